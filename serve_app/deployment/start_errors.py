"""The text a person gets when something did not start: that of an error of ours, or one line out of Ray's and Serve's."""

from __future__ import annotations

import re
from collections.abc import Sequence

from placement.model.errors import ErrorReport, report_of

_RAISED = re.compile(r"^(?:\w+\.)*([A-Z]\w*(?:\(\w+\))?: .+)")
"""Last line of a traceback."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def error_text(error: Exception) -> str:
    """The text of an error of ours, wherever it was raised; of any other its kind and the last line that tells it."""
    report = report_of(error)
    return text_of(report) if report is not None else foreign_reason([f"{type(error).__name__}: {error}"])


def text_of(report: ErrorReport) -> str:
    """The first line of a report's message, and the lines of the list (``- ...``) that follows it."""
    lines = _lines(report.message) or [report.code]
    return "\n".join([lines[0], *_list_after(0, lines)])


def foreign_reason(messages: Sequence[str]) -> str:
    """Of texts that Ray or Serve wrote, full of tracebacks: the last error of the first that has one, else the last line."""
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
