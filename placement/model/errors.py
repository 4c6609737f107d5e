"""Errors reported to the user: each carries a stable code and a complete message, also across process boundaries.

raise LayoutError ──→ the command that checks the layout              one message, made by `report_of`
raise LaunchError ──→ Ray, Serve ──→ the command that deploys         the same, rebuilt from an `ErrorReport`
raise EngineBusy  ──→ token event ──→ endpoint ──→ HTTP response      `code` and message in the JSON body
"""

from __future__ import annotations

from dataclasses import dataclass


class ReportedError(Exception):
    """An error whose text is written for the user whose request failed.

    `code` identifies the kind of error for programs and is stable between versions; ``str()`` is the complete message.
    """

    code: str = "failed"


@dataclass(frozen=True)
class ErrorReport:
    """The code and message of a `ReportedError`, sent across process boundaries that the exception itself cannot cross."""

    code: str
    message: str


def report_of(error: BaseException) -> ErrorReport | None:
    """Returns the code and message of `error` if it is a `ReportedError`, or None for any other error.

    An error that wraps a `ReportedError` from another process as its `cause` attribute (Ray's task errors do), however deep,
    counts as one.
    """
    found: BaseException | None = error
    while isinstance(cause := getattr(found, "cause", None), BaseException):
        found = cause
    return next((ErrorReport(each.code, str(each)) for each in (found, error) if isinstance(each, ReportedError)), None)
