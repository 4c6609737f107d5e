"""The line a person needs, out of what Ray and Serve say when something did not start: texts full of tracebacks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_OURS = re.compile(
    r"\b(?:ArgumentError|LaunchError|PlacementError|ModelError|AbsentWeights|LayoutError|MemoryBudgetError|TokenizerError"
    r"|TemplateError): (.+)"
)
"""Errors whose text is written for the person who asked."""
_RAISED = re.compile(r"^(?:\w+\.)*([A-Z]\w*(?:\(\w+\))?: .+)")
"""Last line of a traceback."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def first_error_text(messages: Sequence[str]) -> str:
    """Text of the last error of ours in the first message that has one; else of the last error; else the last line.

    Lines of a list (``- ...``) that follow it belong to it.
    """
    for pattern in (_OURS, _RAISED):
        for message in messages:
            found = list(_matches(pattern, message))
            if found:
                return found[-1]
    return next((lines[-1] for message in messages if (lines := _lines(message))), "Ray Serve gave no reason")


def error_text(error: Exception) -> str:
    """The same of an exception; one that crossed processes carries their tracebacks in its text."""
    return first_error_text([f"{type(error).__name__}: {error}"])


def _matches(pattern: re.Pattern[str], message: str) -> Iterator[str]:
    lines = _lines(message)
    for at, line in enumerate(lines):
        found = pattern.search(line)
        if found:
            last = next((end for end in range(at + 1, len(lines)) if not lines[end].startswith("- ")), len(lines))
            yield "\n".join([found[1], *lines[at + 1 : last]])


def _lines(message: str) -> list[str]:
    return [line.strip() for line in _COLOUR.sub("", message).splitlines() if line.strip()]
