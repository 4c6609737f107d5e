"""Connection to a running cluster for the duration of a read-only command."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.embedded import local
from serve_app.deployment.start_errors import error_text


@contextmanager
def connected(address: str | None) -> Iterator[local.Connection]:
    """Returns a context manager that is connected to the Ray cluster at `address`, or for None to the one that
    `cluster.embedded.local.connect_running` finds, and leaves it at the end.

    Exits with 2 and the reason if none answers.
    """
    where = address or local.configured_address() or "this machine"
    try:
        connection = local.connect_running(address)
    except Exception as error:
        text = str(error) if isinstance(error, ConnectionError) else error_text(error)
        print(f"error: no Ray cluster answers at {where}: {text}", file=sys.stderr)
        raise SystemExit(2) from error
    try:
        yield connection
    finally:
        local.leave()
