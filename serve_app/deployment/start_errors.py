"""The error text shown when something did not start: that of a Shardwright error, or one line extracted from a Ray or Serve
error."""

from __future__ import annotations

import re
from collections.abc import Sequence

from placement.model.errors import ErrorReport, report_of

_RAISED = re.compile(r"^(?:\w+\.)*([A-Z]\w*(?:\(\w+\))?: .+)")
"""Pattern of the last line of a traceback."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def error_text(error: Exception) -> str:
    """Returns the text about `error` for the user: for a `ReportedError`, even one raised in another process, its message as
    `text_of` shortens it; for any other error, the line with its type and message (see `foreign_reason`)."""
    report = report_of(error)
    return text_of(report) if report is not None else foreign_reason([f"{type(error).__name__}: {error}"])


def text_of(report: ErrorReport) -> str:
    """Returns the first line of a report's message, and the lines of the list (``- ...``) that follows it; the report's code if
    the message is empty."""
    lines = _lines(report.message) or [report.code]
    return "\n".join([lines[0], *_list_after(0, lines)])


def foreign_reason(messages: Sequence[str]) -> str:
    """Returns the reason in `messages`, texts that Ray or Serve wrote, full of tracebacks: the last error in the first text
    that has one, with the list (``- ...``) that follows it; else the last line of the first text that is not empty; else a
    sentence that there is no reason."""
    for message in messages:
        lines = _lines(message)
        raised = [(at, found[1]) for at, line in enumerate(lines) if (found := _RAISED.search(line))]
        if raised:
            at, first = raised[-1]
            return "\n".join([first, *_list_after(at, lines)])
    return next((lines[-1] for message in messages if (lines := _lines(message))), "Ray Serve gave no reason")


def _list_after(at: int, lines: Sequence[str]) -> Sequence[str]:
    last = next((end for end in range(at + 1, len(lines)) if not lines[end].startswith("- ")), len(lines))
    return lines[at + 1 : last]


def _lines(message: str) -> list[str]:
    return [line.strip() for line in _COLOUR.sub("", message).splitlines() if line.strip()]
