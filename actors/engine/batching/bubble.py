"""How much of a pipeline's time its stages idle while there is work: measured, to be held against ``(P-1)/(M+P-1)``.

    stage 0   ████████····      wall: from the first plan in flight to the result of the last
    stage 1   ··████████··      bubble = 1 - (busy of stage 0 + busy of stage 1) / (2 * wall)

Stages tell how long they were busy (waiting for another stage is not); the engine knows how long plans were in flight.
The stages of several DP ranks (attn_dp) count one by one: a DP rank that idles leaves a bubble too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

_WINDOW = 256
"""Results over which the bubble is taken."""


class BubbleMeter:
    """Adds up the time of one set of ranks, in seconds."""

    def __init__(self, stages: int) -> None:
        self.wall_s = 0.0
        """Time with plans in flight."""
        self.busy_s = 0.0
        """Time the stages spent on steps, added up over them."""
        self._stages = stages
        self._since: float | None = None
        self._marks: deque[tuple[float, float]] = deque([(0.0, 0.0)], maxlen=_WINDOW + 1)

    def sent(self, now: float) -> None:
        """A plan is in flight."""
        if self._since is None:
            self._since = now

    def came_back(self, now: float, busy_s: Mapping[int, float], in_flight: int) -> None:
        """A result arrived and `in_flight` plans are left; `busy_s` is what each stage has told so far."""
        self.wall_s += 0.0 if self._since is None else now - self._since
        self.busy_s = sum(busy_s.values())
        self._since = now if in_flight else None
        self._marks.append((self.wall_s, self.busy_s))

    def bubble(self) -> float | None:
        """The idle part over the latest results; None for a single stage, and before there is anything to tell."""
        wall_s, busy_s = (last - first for first, last in zip(self._marks[0], self._marks[-1], strict=True))
        if self._stages == 1 or wall_s == 0 or busy_s == 0:
            return None
        return min(1.0, max(0.0, 1 - busy_s / (self._stages * wall_s)))
