"""The one kind of error whose text a person reads: it carries a code, wherever it is raised and however it travels.

raise LayoutError ──→ the command that checks it                      one message, by `report_of`
raise LaunchError ──→ Ray, Serve ──→ the command that deploys         the same, from a place where its process left it
raise EngineBusy  ──→ token event ──→ endpoint ──→ HTTP answer        `code` and message in its JSON
"""

from __future__ import annotations

from dataclasses import dataclass


class ReportedError(Exception):
    """An error whose text is written for whoever asked for what failed.

    `code` names the kind of error for programs and stays the same between versions; ``str()`` is the text.
    """

    code: str = "failed"


@dataclass(frozen=True)
class ErrorReport:
    """What of a `ReportedError` crosses a process boundary where the exception itself does not."""

    code: str
    message: str


def report_of(error: BaseException) -> ErrorReport | None:
    """The report of a `ReportedError`, also where another error brings it from another process, as its `cause`.

    None for every other error.
    """
    for each in (getattr(error, "cause", None), error):
        if isinstance(each, ReportedError):
            return ErrorReport(each.code, str(each))
    return None
