"""The prefill side of prefill/decode disaggregation: KV that an engine sends. Blocks are kept until every rank has sent them.

    begin ──→ COMPUTING ──first token──→ SENDING ──all ranks done──→ DONE   last event: ``handoff``
                  │                        │
                  └──cancelled, late, a rank failed──→ STOPPING ──all ranks done──→ DONE   last event: ``abort``, ``deadline``

The last event of a ticket is sent when no rank writes any more: it tells the decode side that its blocks can be reused. Until
then the decode side gets a heartbeat about once a second for each ticket that waits, is computed or is sent, as long as every
rank that may write is known to be alive: a sending rank reports by itself, and a step result shows that all ranks are alive.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from actors.engine.batching.dp_rank import DPRank
from actors.engine.config.engine_config import DisaggregationConfig, EngineConfig
from actors.engine.sequences.sequence import Sequence
from actors.wire.kv import KVReport, KVSend, KVSent, KVTicket
from actors.wire.requests import TokenEvent

_HEARTBEAT_INTERVAL_S = 1.0
_RANK_TIMEOUT_S = 4.0
"""Seconds without a report after which a sending rank counts as silent. Sending ranks report once a second, between steps."""


class PrefillTransferState(IntEnum):
    """The state of a prefill-side transfer."""

    COMPUTING = 0
    SENDING = 1
    STOPPING = 2
    DONE = 3


@dataclass(eq=False, slots=True)
class PrefillTransfer:
    """The transfer of one prompt to a decode engine. `waiting_for` holds the world ranks that may still write."""

    ticket_id: str
    sequence: Sequence
    dp_rank: int
    blocks: list[int]
    waiting_for: set[int]
    last: TokenEvent
    """The event that ends the ticket."""
    state: PrefillTransferState = PrefillTransferState.COMPUTING

    def advance(self, state: PrefillTransferState) -> None:
        """Move to the later state `state`. An earlier or equal state is a programming error (`AssertionError`)."""
        assert state > self.state, f"prefill transfer {self.ticket_id} cannot go from {self.state.name} to {state.name}"
        self.state = state


@dataclass(slots=True)
class PrefillTransferCounts:
    """Counters of prefill-side transfers, over all ranks, since the ranks started."""

    completed: int = 0
    failed: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0
    """Seconds during which a rank had writes in flight, summed over tickets and ranks."""
    exposed_s: float = 0.0
    """The part of `busy_s` that did not overlap with computation (see `KVSent`)."""

    @property
    def overlap(self) -> float:
        """The fraction of `busy_s` that overlapped with computation, from 0 to 1; 0 if nothing was sent."""
        return 1 - self.exposed_s / self.busy_s if self.busy_s else 0.0


class PrefillTransfers:
    """All prefill-side transfers of one engine. Not thread-safe: the scheduler's thread calls it."""

    def __init__(self, config: EngineConfig, dp_ranks: list[DPRank]) -> None:
        self.counts = PrefillTransferCounts()
        self.sends: list[KVSend] = []
        self.forgets: list[str] = []
        """`sends` and `forgets` are orders for the next plan."""
        self._config, self._dp_ranks = config, dp_ranks
        self._open: dict[str, PrefillTransfer] = {}
        self._heartbeat_due_s = -math.inf
        self._last_result_s = -math.inf
        """Time of the last step result."""
        self._last_report_s: dict[int, float] = {}
        """Time of the last report of each rank."""

    def __len__(self) -> int:
        return len(self._open)

    def ran(self, now: float) -> None:
        """Record that the result of a step arrived at `now` (seconds on the engine's clock), which shows that all ranks are
        alive."""
        self._last_result_s = now

    def heartbeats(self, tickets: Iterable[str], now: float) -> list[TokenEvent]:
        """Return a heartbeat event for each ticket id of `tickets`, which wait or are computed, and for each ticket that is
        being sent.

        Returns none within a second of the previous heartbeats, or while a sending rank is silent, since it may be frozen.
        `now` is in seconds on the engine's clock.
        """
        if now < self._heartbeat_due_s or any(
            self._is_silent(rank, now) for each in self._open.values() for rank in each.waiting_for
        ):
            return []
        self._heartbeat_due_s = now + _HEARTBEAT_INTERVAL_S
        sending = [name for name, each in self._open.items() if each.state is PrefillTransferState.SENDING]
        return [TokenEvent(request_id=name) for name in (*tickets, *sending)]

    def _is_silent(self, rank: int, now: float) -> bool:
        return now - max(self._last_result_s, self._last_report_s.get(rank, -math.inf)) > _RANK_TIMEOUT_S

    def begin(self, sequence: Sequence, ticket: KVTicket, now: float) -> None:
        """Order the ranks to send the KV of `sequence`, which starts at `now` (seconds on the engine's clock), as it is
        computed. `ticket` is that of its request; its lease counts from the arrival of the request."""
        lease_s = max(0.0, sequence.arrival_s + ticket.lease_s - now)
        send = KVSend(
            ticket=ticket,
            dp_rank=sequence.dp_rank,
            sequence_id=sequence.sequence_id,
            lease_s=lease_s,
            grace_s=self._disaggregation.grace_s / 2,  # well before the decode side takes its blocks back
        )
        self.sends.append(send)
        self._open[ticket.ticket_id] = PrefillTransfer(
            ticket_id=ticket.ticket_id,
            sequence=sequence,
            dp_rank=sequence.dp_rank,
            blocks=list(sequence.blocks),
            waiting_for=set(self._disaggregation.ranks_of(sequence.dp_rank)),
            last=TokenEvent(request_id=ticket.ticket_id, finish="handoff"),
        )

    def computed(self, ticket_id: str) -> TokenEvent | None:
        """Record that the prompt of a ticket is computed. From now on this object holds the blocks of its sequence.

        Returns the last event of the ticket if everything is sent already, and frees the blocks; otherwise None. Raises
        `KeyError` if nothing is being sent for the ticket.
        """
        self._open[ticket_id].advance(PrefillTransferState.SENDING)
        return self._last_of(self._open[ticket_id])

    def stop(self, ticket_id: str, last: TokenEvent) -> TokenEvent | None:
        """Stop sending for a ticket, and end it with the event `last`. Does nothing if it has ended or is being stopped.

        Returns `last` if no rank writes any more; otherwise None, and `on_report` returns it later.
        """
        transfer = self._open.get(ticket_id)
        if transfer is None or transfer.state >= PrefillTransferState.STOPPING:
            return None
        transfer.advance(PrefillTransferState.STOPPING)
        transfer.last = last
        if transfer.waiting_for:
            self.forgets.append(ticket_id)
        return self._last_of(transfer)

    def on_report(self, report: KVReport, now: float) -> tuple[list[TokenEvent], list[Sequence]]:
        """Handle the report of a rank, received at `now` (seconds on the engine's clock).

        Returns the last events of the transfers that are done, and the sequences of failed transfers whose prompts are not
        computed yet and need not be.
        """
        self._last_report_s[report.world_rank] = now
        events, failed = list[TokenEvent | None](), list[Sequence]()
        for sent in report.sent:
            transfer = self._open.get(sent.ticket_id)
            if transfer is None:
                continue
            self._count(sent)
            transfer.waiting_for.discard(report.world_rank)
            if sent.error is not None and transfer.state < PrefillTransferState.STOPPING:
                failed += [transfer.sequence] if transfer.state is PrefillTransferState.COMPUTING else []
                events.append(self.stop(sent.ticket_id, _aborted(sent.ticket_id, sent.error)))
            else:
                events.append(self._last_of(transfer))
        return [event for event in events if event is not None], failed

    def _last_of(self, transfer: PrefillTransfer) -> TokenEvent | None:
        """If a transfer is done, free its blocks and return its last event; otherwise return None."""
        if transfer.waiting_for or transfer.state is PrefillTransferState.COMPUTING:
            return None
        self.counts.completed += transfer.state is PrefillTransferState.SENDING
        self.counts.failed += transfer.state is PrefillTransferState.STOPPING
        transfer.advance(PrefillTransferState.DONE)
        del self._open[transfer.ticket_id]
        self._dp_ranks[transfer.dp_rank].pool.free(transfer.blocks)
        return transfer.last

    def _count(self, sent: KVSent) -> None:
        self.counts.num_bytes += sent.num_bytes
        self.counts.busy_s += sent.busy_s
        self.counts.exposed_s += sent.exposed_s

    @property
    def _disaggregation(self) -> DisaggregationConfig:
        assert self._config.disaggregation is not None, "an engine without a pool sends nothing"
        return self._config.disaggregation


def _aborted(ticket_id: str, reason: str) -> TokenEvent:
    return TokenEvent(request_id=ticket_id, finish="abort", error=reason)
