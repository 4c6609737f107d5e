"""The waiting queue: decides which request is admitted next, by age, priority, preemption, tenant and arrival.

Requests are admitted in this order:

1. requests queued for `overdue_after_s`, the oldest first;
2. requests with a lower `priority` value;
3. preempted requests (the client has already seen tokens of them);
4. requests of the tenant that was served the fewest tokens;
5. requests that arrived earlier.

**No starvation.** Whatever else arrives, after `overdue_after_s` a request is preceded only by requests that arrived before it,
and those are finitely many with finitely many tokens each. It stays overdue once admitted, so that later arrivals do not
preempt it either. The head of the queue is never overtaken because it is large.
"""

from __future__ import annotations

from collections import deque

from actors.engine.sequences.fairness import TenantCounters
from actors.engine.sequences.sequence import Sequence

_QueueKey = tuple[int, str]


class WaitingQueue:
    """The sequences that hold no blocks, in one FIFO queue per (priority, tenant)."""

    def __init__(self, overdue_after_s: float, tenants: TenantCounters) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self._overdue_after_s = overdue_after_s
        self._tenants = tenants
        self._queues: dict[_QueueKey, deque[Sequence]] = {}

    def push(self, sequence: Sequence) -> None:
        """Add a new sequence at the end of the queue of its priority and tenant."""
        self._queues.setdefault(_queue_key(sequence), deque()).append(sequence)
        self._count(sequence, 1)

    def push_back_in(self, sequence: Sequence) -> None:
        """Add a preempted sequence, before all sequences of its priority and tenant that arrived later."""
        queue = self._queues.setdefault(_queue_key(sequence), deque())
        place = next((i for i, other in enumerate(queue) if other.order > sequence.order), len(queue))
        queue.insert(place, sequence)
        self._count(sequence, 1)

    def first(self, now: float) -> Sequence | None:
        """Return the sequence to admit next, or None if the queue is empty. The sequence stays in the queue.

        Overdue sequences, which arrived at least `overdue_after_s` before `now` (seconds on the engine's clock), come first,
        the oldest first. Then follow: lower `priority`, preempted ones, the tenant served the fewest tokens, earlier arrival.
        Only the head of each (priority, tenant) is compared; it is marked overdue if it is.
        """
        return min((queue[0] for queue in self._queues.values()), key=lambda head: self._key(head, now), default=None)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue. Raises `KeyError` or `ValueError` if it is not in it."""
        queue = self._queues[_queue_key(sequence)]
        queue.remove(sequence)
        if not queue:
            del self._queues[_queue_key(sequence)]
        self._count(sequence, -1)

    def _key(self, head: Sequence, now: float) -> tuple[bool, int, bool, int, int]:
        if now - head.arrival_s >= self._overdue_after_s:
            head.overdue = True
            return (False, 0, False, 0, head.order)
        return (True, head.request.priority, head.preemptions == 0, self._tenants.served(head.request.tenant), head.order)

    def _count(self, sequence: Sequence, sign: int) -> None:
        self.num_requests += sign
        self.num_tokens += sign * len(sequence.tokens)


def _queue_key(sequence: Sequence) -> _QueueKey:
    return (sequence.request.priority, sequence.request.tenant)
