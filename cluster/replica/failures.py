"""Why a deployment's process could not be made, kept where the command that deploys can read it.

Ray Serve hands on an error of a constructor as the text of its traceback. So the constructor leaves its own errors, with their
codes, in Ray's key-value store, which is there before any replica runs.

    constructor ──keeping──→ store ──kept──→ command         one report a deployment, the newest
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put

from cluster.embedded.local import NAMESPACE
from placement.model.errors import ErrorReport, report_of

_WHERE = NAMESPACE.encode()


@contextmanager
def keeping(application: str, deployment: str) -> Iterator[None]:
    """Keep the report of a `ReportedError` that is raised inside. It is raised all the same, as is every other error."""
    try:
        yield
    except Exception as error:
        report = report_of(error)
        if report is not None:
            _internal_kv_put(_key(application, deployment), json.dumps(asdict(report)).encode(), namespace=_WHERE)
        raise


def kept(application: str, deployment: str) -> ErrorReport | None:
    """The newest report of a deployment since `forget`, None where there is none."""
    found = _internal_kv_get(_key(application, deployment), namespace=_WHERE)
    return None if found is None else ErrorReport(**json.loads(found))


def forget(application: str) -> None:
    """Drop the reports of an application, which is deployed anew."""
    for key in _internal_kv_list(_key(application, ""), namespace=_WHERE):
        _internal_kv_del(key, namespace=_WHERE)


def _key(application: str, deployment: str) -> bytes:
    return f"failed-{application}/{deployment}".encode()
