"""The index of requests that have not ended, by id, tenant and deadline."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from actors.engine.sequences.fairness import TenantCounters
from actors.engine.sequences.sequence import Sequence
from actors.wire.requests import FinishReason


class LiveRequests:
    """The sequences of all requests that have not ended. Not thread-safe: the scheduler's thread calls it."""

    def __init__(self, tenants: TenantCounters) -> None:
        self._tenants = tenants
        self._live: dict[str, Sequence] = {}
        self._deadlines: list[tuple[float, int, str]] = []
        """Heap of (deadline, order, request id). It holds ids only, because an entry outlives its request."""
        self._need_no_step: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._live)

    def get(self, request_id: str) -> Sequence | None:
        """Return the sequence of the request `request_id`, or None if it is unknown or has ended."""
        return self._live.get(request_id)

    def tickets(self) -> Iterator[str]:
        """Return the ids of the live requests that carry a KV transfer ticket of a decode engine."""
        return (name for name, sequence in self._live.items() if sequence.request.ticket is not None)

    def join(self, sequence: Sequence) -> None:
        """Add a new sequence, and count its request for its tenant. No live request may have the same id."""
        self._live[sequence.request.request_id] = sequence
        self._tenants.join(sequence.request.tenant)
        if sequence.deadline_s < math.inf:
            heapq.heappush(self._deadlines, (sequence.deadline_s, sequence.order, sequence.request.request_id))
        if sequence.is_empty_work:
            self._need_no_step.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended. Raises `KeyError` if its request is not live."""
        del self._live[sequence.request.request_id]
        self._tenants.leave(sequence.request.tenant)

    def due(self, now: float) -> list[tuple[Sequence, FinishReason]]:
        """Return the sequences that end without another step, each once, with the finish reason. They stay live until `leave`.

        The reason is ``length`` if there is nothing to compute, and ``deadline`` if the deadline has passed at `now`, in
        seconds on the engine's clock.
        """
        found: dict[Sequence, FinishReason] = {
            sequence: "length" for sequence in self._need_no_step if self._live.get(sequence.request.request_id) is sequence
        }
        self._need_no_step.clear()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, order, request_id = heapq.heappop(self._deadlines)
            sequence = self._live.get(request_id)
            if sequence is not None and sequence.order == order:  # not a later request with the same id
                found.setdefault(sequence, "deadline")
        return list(found.items())
