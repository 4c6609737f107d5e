"""Requests that have not ended: by id, by tenant, by deadline."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from actors.engine.sequences.fairness import TenantCounters
from actors.engine.sequences.sequence import Sequence
from actors.wire.requests import FinishReason


class LiveRequests:
    """Not thread-safe: the scheduler's thread calls it."""

    def __init__(self, tenants: TenantCounters) -> None:
        self._tenants = tenants
        self._live: dict[str, Sequence] = {}
        self._deadlines: list[tuple[float, int, str]] = []
        """(deadline, order, request id): ids only, because an entry outlives its request."""
        self._need_no_step: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._live)

    def get(self, request_id: str) -> Sequence | None:
        """None for one that is unknown or has ended."""
        return self._live.get(request_id)

    def tickets(self) -> Iterator[str]:
        """Those of the requests that a decode side has asked for."""
        return (name for name, sequence in self._live.items() if sequence.request.ticket is not None)

    def join(self, sequence: Sequence) -> None:
        """Of an id that nobody here has."""
        self._live[sequence.request.request_id] = sequence
        self._tenants.join(sequence.request.tenant)
        if sequence.deadline_s < math.inf:
            heapq.heappush(self._deadlines, (sequence.deadline_s, sequence.order, sequence.request.request_id))
        if sequence.is_empty_work:
            self._need_no_step.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """It has ended."""
        del self._live[sequence.request.request_id]
        self._tenants.leave(sequence.request.tenant)

    def due(self, now: float) -> list[tuple[Sequence, FinishReason]]:
        """Those that end without another step, each once, and why: nothing is to be computed, or the deadline has passed."""
        found: dict[Sequence, FinishReason] = {
            sequence: "length" for sequence in self._need_no_step if self._live.get(sequence.request.request_id) is sequence
        }
        self._need_no_step.clear()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, order, request_id = heapq.heappop(self._deadlines)
            sequence = self._live.get(request_id)
            if sequence is not None and sequence.order == order:  # not a later request of the same id
                found.setdefault(sequence, "deadline")
        return list(found.items())
