"""A second try to start Ray, whose parts must answer within fixed times, which are too short on a busy machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

from cluster.embedded.processes import descendants, end_descendants
from placement.model.errors import ReportedError
from placement.nodes.limits import cpu_limit

T = TypeVar("T")
_SIGNS = ("timed out", "timeout", "overloaded", "failed to connect to gcs", "did not start within", "deadline exceeded")
"""Parts of the texts with which Ray reports that something did not answer in time. It has no type of error for that."""


class StartTimeout(ReportedError, TimeoutError):
    """Ray did not start in time, twice. The message says what did not answer, and how busy the machine is."""

    code = "start_timeout"


def started(start: Callable[[], T], clean_up: Callable[[], None]) -> T:
    """Returns what `start` returns. If it raises because Ray did not answer in time, `clean_up` is called, the processes that
    it has started are killed, and it is called once more.

    Prints a line to stderr before the second call. Raises `StartTimeout` if that one is not answered in time either; any other
    error is raised as it is.
    """
    before = descendants()
    try:
        return start()
    except Exception as error:
        if not is_timeout(error):
            raise
        print(f"Ray did not start in time ({_first_line(error)}); trying once more.", file=sys.stderr, flush=True)
    _clear(before, clean_up)
    try:
        return start()
    except Exception as error:
        if not is_timeout(error):
            raise
        _clear(before, clean_up)
        load, cpus = os.getloadavg()[0], cpu_limit()
        raise StartTimeout(
            f"Ray did not start in time on this machine, in two tries: {_first_line(error)}. The load of the machine is "
            f"{load:.1f}, and this process may use {cpus} CPU{'' if cpus == 1 else 's'}: try again when less runs"
        ) from error


def is_timeout(error: BaseException) -> bool:
    """Returns whether `error`, or one that caused it, says that something did not answer in time."""
    return any(isinstance(each, TimeoutError) or any(sign in str(each).lower() for sign in _SIGNS) for each in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _clear(spared: list[int], clean_up: Callable[[], None]) -> None:
    with suppress(Exception):  # what has not started completely often cannot be ended properly
        clean_up()
    end_descendants(spared)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
