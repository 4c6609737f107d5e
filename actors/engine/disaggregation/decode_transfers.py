"""Decode side of prefill/decode disaggregation: blocks that an engine has reserved for prompts which a prefill pool computes.

    reserve ──→ ASKED ──all ranks ready──→ OPEN ──first token, and all bytes here──→ DONE   (the sequence runs)
                  │                         │
                  │ never told to anyone    │ cancelled, failed, lease over
                  ↓                         ↓
                 DONE ←─────────────────  DRAINING: the sequence has left, its blocks have not

States only move forward. While a ticket is out somebody may write into its blocks, so they go to nobody else before the
writer has said that it writes no more, or everything has arrived, or the lease is over (no write begins after it) and
`DisaggregationConfig.grace_s` has passed on top.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from actors.engine.batching.dp_rank import DPRank
from actors.engine.config.engine_config import DisaggregationConfig, EngineConfig
from actors.engine.sequences.sequence import Sequence
from actors.wire.kv import KVExpect, KVReader, KVReport, KVTicket
from actors.wire.requests import TokenEvent


class DecodeTransferState(IntEnum):
    ASKED = 0
    """The ranks are told to be ready."""
    OPEN = 1
    """The ticket is out."""
    DRAINING = 2
    DONE = 3


@dataclass(eq=False, slots=True)
class DecodeTransfer:
    """Blocks for the positions from `first` on of one prompt, and how far its hand-off is."""

    ticket_id: str
    sequence: Sequence
    dp_rank: int
    blocks: list[int]
    ranks: frozenset[int]
    """World ranks that get a part of it."""
    first: int
    lease_ends_s: float
    state: DecodeTransferState = DecodeTransferState.ASKED
    readers: dict[int, KVReader] = field(default_factory=dict)
    arrived: set[int] = field(default_factory=set)
    heartbeat_deadline_s: float = math.inf
    """When the next heartbeat is due at the latest; infinite once it has said that all is sent."""
    is_committed: bool = False
    """The first token is here."""

    @property
    def is_live(self) -> bool:
        """Whether its sequence still waits for it."""
        return self.state < DecodeTransferState.DRAINING

    @property
    def has_arrived(self) -> bool:
        return self.arrived == self.ranks

    @property
    def ends_s(self) -> float:
        """When it is late. All that is here needs no heartbeat."""
        return (
            self.lease_ends_s if self.is_committed and self.has_arrived else min(self.lease_ends_s, self.heartbeat_deadline_s)
        )

    def advance(self, state: DecodeTransferState) -> None:
        """On to a later state."""
        assert state > self.state, f"decode transfer {self.ticket_id} cannot go from {self.state.name} to {state.name}"
        self.state = state


@dataclass(slots=True)
class DecodeTransferCounts:
    """What happened since the engine was made."""

    made: int = 0
    wait_s: float = 0.0
    """From the arrival of requests to their blocks, summed."""
    completed: int = 0
    fallen_back: int = 0
    """Given up by the prefill side, or too late: this engine computed the prompt itself."""
    outlived: int = 0
    """Drained until the lease was over, since nobody said that it would not write."""


class DecodeTransfers:
    """All decode-side transfers of one engine. Not thread-safe: the scheduler's thread calls it."""

    def __init__(self, config: EngineConfig, dp_ranks: list[DPRank]) -> None:
        self.counts = DecodeTransferCounts()
        self.expects: list[KVExpect] = []
        self.forgets: list[str] = []
        """Both: for the next plan."""
        self._config, self._dp_ranks = config, dp_ranks
        self._open: dict[str, DecodeTransfer] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[DecodeTransfer]:
        return iter(self._open.values())

    def get(self, ticket_id: str) -> DecodeTransfer | None:
        """The one with that ticket, unless it is done."""
        return self._open.get(ticket_id)

    def is_worth(self, sequence: Sequence) -> bool:
        """The rule: a prompt is handed off if this engine has `DisaggregationConfig.least_tokens` of it or more in neither
        cache nor tiers."""
        disaggregation = self._config.disaggregation
        return disaggregation is not None and sequence.reserves and sequence.todo >= disaggregation.least_tokens

    def reserve(self, sequence: Sequence, now: float) -> None:
        """Keep the blocks that `sequence` has just got on its DP rank for its prompt, and have the ranks be ready for it."""
        disaggregation, request = self._disaggregation, sequence.request
        dp_rank = self._dp_ranks[sequence.dp_rank]
        transfer = DecodeTransfer(
            ticket_id=f"{request.request_id}~{sequence.order}",
            sequence=sequence,
            dp_rank=dp_rank.index,
            blocks=list(sequence.blocks),
            ranks=disaggregation.ranks_of(dp_rank.index),
            first=sequence.num_computed,
            lease_ends_s=now + disaggregation.lease_s,
        )
        dp_rank.num_reserved += 1
        self._open[transfer.ticket_id] = transfer
        self.counts.made += 1
        self.counts.wait_s += now - sequence.arrival_s
        self.expects.append(
            KVExpect(
                ticket_id=transfer.ticket_id,
                dp_rank=dp_rank.index,
                blocks=self._pages(transfer),
                first=transfer.first,
                tokens=sequence.prompt_length,
            )
        )

    def on_report(self, report: KVReport, now: float) -> list[TokenEvent]:
        """What a rank tells. The events are tickets that can go out."""
        events = []
        for ticket_id, reader in report.opened.items():
            transfer = self._open.get(ticket_id)
            if transfer is not None and transfer.state is DecodeTransferState.ASKED:
                transfer.readers[report.world_rank] = reader
                if transfer.readers.keys() == transfer.ranks:
                    transfer.advance(DecodeTransferState.OPEN)
                    transfer.heartbeat_deadline_s = now + self._disaggregation.first_heartbeat_timeout_s
                    events.append(
                        TokenEvent(request_id=transfer.sequence.request.request_id, ticket=self._ticket(transfer, now))
                    )
        for ticket_id in report.arrived:
            transfer = self._open.get(ticket_id)
            if transfer is not None:
                transfer.arrived.add(report.world_rank)
                if transfer.state is DecodeTransferState.DRAINING and transfer.has_arrived:
                    self._free(transfer)
        return events

    def ready(self, dp_rank: int) -> list[Sequence]:
        """The sequences of a DP rank that can run: they leave, with their blocks."""
        found = [
            transfer
            for transfer in self
            if transfer.dp_rank == dp_rank and transfer.is_committed and transfer.has_arrived and transfer.is_live
        ]
        for transfer in found:
            transfer.advance(DecodeTransferState.DONE)
            del self._open[transfer.ticket_id]
            self._dp_ranks[dp_rank].num_reserved -= 1
            self.counts.completed += 1
        return [transfer.sequence for transfer in found]

    def on_heartbeat(self, transfer: DecodeTransfer, is_sent: bool, now: float) -> None:
        """Whoever has its ticket lives, or has nothing more to say of it."""
        transfer.heartbeat_deadline_s = math.inf if is_sent else now + self._disaggregation.heartbeat_timeout_s

    def of(self, sequence: Sequence) -> DecodeTransfer:
        """That of a reserved sequence."""
        return next(transfer for transfer in self if transfer.sequence is sequence and transfer.is_live)

    def abandon(self, transfer: DecodeTransfer) -> None:
        """Its sequence wants it no longer. The blocks stay until nobody can write to them."""
        self._dp_ranks[transfer.dp_rank].num_reserved -= 1
        nobody_knows = transfer.state is DecodeTransferState.ASKED
        transfer.advance(DecodeTransferState.DRAINING)
        if nobody_knows or transfer.has_arrived:
            self._free(transfer)

    def close(self, transfer: DecodeTransfer) -> None:
        """The writer writes no more."""
        if transfer.state is DecodeTransferState.DRAINING:
            self._free(transfer)

    def expired(self, now: float) -> list[DecodeTransfer]:
        """Those still live whose lease is over before all was here, or whose heartbeat is overdue; drained
        ones past their grace are done."""
        late = [transfer for transfer in self if now >= transfer.ends_s]
        for transfer in late:
            if transfer.state is DecodeTransferState.DRAINING and now >= transfer.lease_ends_s + self._disaggregation.grace_s:
                self.counts.outlived += 1
                self._free(transfer)
        return [transfer for transfer in late if transfer.is_live]

    @property
    def _disaggregation(self) -> DisaggregationConfig:
        assert self._config.disaggregation is not None, "an engine without a pool reserves nothing"
        return self._config.disaggregation

    def _free(self, transfer: DecodeTransfer) -> None:
        if not transfer.has_arrived:
            self.forgets.append(transfer.ticket_id)
        transfer.advance(DecodeTransferState.DONE)
        del self._open[transfer.ticket_id]
        self._dp_ranks[transfer.dp_rank].pool.free(transfer.blocks)

    def _pages(self, transfer: DecodeTransfer) -> list[int]:
        return [block // self._config.kv_owners for block in transfer.blocks]

    def _ticket(self, transfer: DecodeTransfer, now: float) -> KVTicket:
        sequence = transfer.sequence
        return KVTicket(
            ticket_id=transfer.ticket_id,
            layout=str(self._disaggregation.layout),
            page_tokens=self._config.block_size,
            dp_rank=transfer.dp_rank,
            blocks=self._pages(transfer),
            first=transfer.first,
            tokens=sequence.prompt_length,
            rope_length=sequence.rope_length,
            readers=[transfer.readers[rank] for rank in sorted(transfer.readers)],
            lease_s=transfer.lease_ends_s - now,
        )
