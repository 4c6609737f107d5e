"""Error reports of deployments whose replicas could not be constructed, stored where the deploying command can read them.

Ray Serve forwards an error of a replica's constructor only as the text of its traceback. The constructor therefore stores its
own errors, with their codes, in Ray's internal key-value store, which is available before any replica runs.

    constructor ──storing_errors──→ store ──stored_error──→ command         the newest report of each deployment
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
def storing_errors(application: str, deployment: str) -> Iterator[None]:
    """Returns a context manager that stores the report of a `ReportedError` raised inside it in the cluster, where
    `stored_error` finds it.

    `application` and `deployment` are names in Ray Serve. All errors propagate; no report of another kind of error is stored.
    """
    try:
        yield
    except Exception as error:
        report = report_of(error)
        if report is not None:
            _internal_kv_put(_key(application, deployment), json.dumps(asdict(report)).encode(), namespace=_WHERE)
        raise


def stored_error(application: str, deployment: str) -> ErrorReport | None:
    """Returns the error with which a replica of the Serve deployment `deployment` of `application` last failed to start
    (`storing_errors`), or None if none has since `delete_errors`. Raises a `RayError` if the cluster does not answer."""
    found = _internal_kv_get(_key(application, deployment), namespace=_WHERE)
    return None if found is None else ErrorReport(**json.loads(found))


def delete_errors(application: str) -> None:
    """Delete the error reports of all deployments of the Serve application `application`, which is about to be deployed
    again."""
    for key in _internal_kv_list(_key(application, ""), namespace=_WHERE):
        _internal_kv_del(key, namespace=_WHERE)


def _key(application: str, deployment: str) -> bytes:
    return f"failed-{application}/{deployment}".encode()
