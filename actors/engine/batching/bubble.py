"""Measures the pipeline bubble: the fraction of time that stages idle while there is work, to compare with ``(P-1)/(M+P-1)``.

    stage 0   ████████····      wall: from the first plan in flight to the result of the last
    stage 1   ··████████··      bubble = 1 - (busy of stage 0 + busy of stage 1) / (2 * wall)

Stages report how long they were busy, waiting for other stages excluded; the engine measures how long plans were in flight. The
stages of several DP ranks (attn_dp) are counted separately, since an idle DP rank leaves a bubble too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

_WINDOW = 256
"""Number of results over which the bubble is measured."""


class BubbleMeter:
    """Measures the in-flight and busy seconds of one set of ranks."""

    def __init__(self, stages: int) -> None:
        self.wall_s = 0.0
        """Seconds with plans in flight."""
        self.busy_s = 0.0
        """Seconds that the stages spent on steps, summed over stages."""
        self._stages = stages
        self._since: float | None = None
        self._marks: deque[tuple[float, float]] = deque([(0.0, 0.0)], maxlen=_WINDOW + 1)

    def sent(self, now: float) -> None:
        """Record that a plan was sent at `now`, in seconds on the engine's clock."""
        if self._since is None:
            self._since = now

    def came_back(self, now: float, busy_s: Mapping[int, float], in_flight: int) -> None:
        """Record that a result arrived at `now` (seconds on the engine's clock), after which `in_flight` plans still have no
        result.

        `busy_s` holds the seconds that each stage has been busy since it started, by stage.
        """
        self.wall_s += 0.0 if self._since is None else now - self._since
        self.busy_s = sum(busy_s.values())
        self._since = now if in_flight else None
        self._marks.append((self.wall_s, self.busy_s))

    def bubble(self) -> float | None:
        """Return the idle fraction of the stages' time (0 to 1) over the latest 256 results; None for a single stage, or before
        anything was measured."""
        wall_s, busy_s = (last - first for first, last in zip(self._marks[0], self._marks[-1], strict=True))
        if self._stages == 1 or wall_s == 0 or busy_s == 0:
            return None
        return min(1.0, max(0.0, 1 - busy_s / (self._stages * wall_s)))
