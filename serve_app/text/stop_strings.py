"""Stop strings, independent of token boundaries.

Only text that may still become a stop string is held back. With the stop string ``BCDE``::

    text in       AB    CD    EF
    released      A     -     stop: the text is "A"
                      (held: B, BCD)

The stop string that is complete first, in characters, wins; of those complete at the same character, the longest. The outcome
therefore does not depend on how tokens split the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Released(NamedTuple):
    """Text that may be shown, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class StopStrings:
    """Searches for `stops` in a text that arrives in parts. Each character costs amortised constant time per stop string."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include`: whether the stop string itself is released."""
        self._stops = [_Matcher(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._include = include
        self._held = ""

    def push(self, text: str) -> Released:
        """Adds `text` to the input. Returns the text that can be shown now (the rest is held back, since it may begin a stop
        string), and the stop string that is complete, if any.

        After a stop string was found, nothing more may be pushed.
        """
        start = len(self._held)
        self._held += text
        for position, character in enumerate(text, start + 1):
            # All matchers must see the character, hence the list.
            complete = [matcher for matcher in self._stops if matcher.push(character)]
            if complete:
                return self._stop(complete[0].text, position)
        keep = max((matcher.length for matcher in self._stops), default=0)
        cut = len(self._held) - keep
        released, self._held = self._held[:cut], self._held[cut:]
        return Released(released)

    def finish(self) -> str:
        """Returns the text still held back, at the end of the input, and empties it; empty after a stop string."""
        held, self._held = self._held, ""
        return held

    def _stop(self, stop: str, end: int) -> Released:
        released = self._held[: end if self._include else end - len(stop)]
        self._held = ""
        return Released(released, stop)


class _Matcher:
    """Matcher by Knuth, Morris and Pratt: `length` is that of the longest prefix of `text` that ends the pushed characters."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = 0
        self._borders = _borders(text)

    def push(self, character: str) -> bool:
        """Adds one character. Returns whether the pushed characters now end with `text`. After that, nothing more may be
        pushed."""
        while self.length and self.text[self.length] != character:
            self.length = self._borders[self.length - 1]
        if self.text[self.length] == character:
            self.length += 1
        return self.length == len(self.text)


def _borders(text: str) -> list[int]:
    """Returns, for each prefix of `text`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for position in range(1, len(text)):
        while length and text[length] != text[position]:
            length = borders[length - 1]
        length += text[length] == text[position]
        borders[position] = length
    return borders
