"""Prefill side of prefill/decode disaggregation: what an engine has yet to send, blocks that stay where they are until every
rank has sent its part.

    begin ──→ COMPUTING ──first token──→ SENDING ──all ranks done──→ DONE   last event: ``handoff``
                  │                        │
                  └──cancelled, late, a rank failed──→ STOPPING ──all ranks done──→ DONE   last event: ``abort``, ``deadline``

The last event of a ticket goes out when no rank writes any more: to the decode side it means that the blocks are its own again.
Until its sequence has left, a ticket gets a heartbeat about once a second, as long as every rank that may write has been heard
of:
a rank that sends says so by itself, and a result is a sign of all of them.
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
"""How long a rank that has something to send may be silent: it tells once a second, between steps."""


class PrefillTransferState(IntEnum):
    COMPUTING = 0
    SENDING = 1
    STOPPING = 2
    DONE = 3


@dataclass(eq=False, slots=True)
class PrefillTransfer:
    """One prompt on its way out. `waiting_for`: world ranks that may still write."""

    ticket_id: str
    sequence: Sequence
    dp_rank: int
    blocks: list[int]
    waiting_for: set[int]
    last: TokenEvent
    """The event that ends it."""
    state: PrefillTransferState = PrefillTransferState.COMPUTING

    def advance(self, state: PrefillTransferState) -> None:
        """On to a later state."""
        assert state > self.state, f"prefill transfer {self.ticket_id} cannot go from {self.state.name} to {state.name}"
        self.state = state


@dataclass(slots=True)
class PrefillTransferCounts:
    """Of all ranks, since the engine was made."""

    completed: int = 0
    failed: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0
    """In which a rank had writes under way, summed over tickets and ranks."""
    exposed_s: float = 0.0
    """The part of that which no computing hid: see `KVSent`."""

    @property
    def overlap(self) -> float:
        """Part of the transfers' time that computing hid."""
        return 1 - self.exposed_s / self.busy_s if self.busy_s else 0.0


class PrefillTransfers:
    """All prefill-side transfers of one engine. Not thread-safe: the scheduler's thread calls it."""

    def __init__(self, config: EngineConfig, dp_ranks: list[DPRank]) -> None:
        self.counts = PrefillTransferCounts()
        self.sends: list[KVSend] = []
        self.forgets: list[str] = []
        """Both: for the next plan."""
        self._config, self._dp_ranks = config, dp_ranks
        self._open: dict[str, PrefillTransfer] = {}
        self._heartbeat_due_s = -math.inf
        self._last_result_s = -math.inf
        """When the last result came."""
        self._last_report_s: dict[int, float] = {}
        """When each rank told something."""

    def __len__(self) -> int:
        return len(self._open)

    def ran(self, now: float) -> None:
        """The result of a step is here: all ranks live."""
        self._last_result_s = now

    def heartbeats(self, tickets: Iterable[str], now: float) -> list[TokenEvent]:
        """That those of `tickets`, which wait or are computed, and those being sent go on. None within a second of the last
        ones, or while a rank is silent: it may be frozen."""
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
        """Have the ranks send what they compute of a sequence that starts now."""
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
        """The prompt is computed; the blocks of its sequence are held here from now on. Its last event, if all is sent."""
        self._open[ticket_id].advance(PrefillTransferState.SENDING)
        return self._last_of(self._open[ticket_id])

    def stop(self, ticket_id: str, last: TokenEvent) -> TokenEvent | None:
        """Send no more of it, and end it with `last`: returned, if no rank writes any more. Harmless where it has ended."""
        transfer = self._open.get(ticket_id)
        if transfer is None or transfer.state >= PrefillTransferState.STOPPING:
            return None
        transfer.advance(PrefillTransferState.STOPPING)
        transfer.last = last
        if transfer.waiting_for:
            self.forgets.append(ticket_id)
        return self._last_of(transfer)

    def on_report(self, report: KVReport, now: float) -> tuple[list[TokenEvent], list[Sequence]]:
        """What a rank tells: the last events of hand-offs that are done, and whose prompts are not computed and need not be."""
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
        """The last event of a hand-off that is done: its blocks go back."""
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
