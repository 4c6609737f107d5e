"""The decode side of prefill/decode disaggregation: KV blocks reserved for prompts that a prefill pool computes.

    reserve ──→ ASKED ──all ranks ready──→ OPEN ──first token and all bytes arrived──→ DONE   (the sequence runs)
                  │                         │
                  │ ticket never issued     │ cancelled, failed, lease over
                  ↓                         ↓
                 DONE ←─────────────────  DRAINING: the sequence is gone, its blocks are not free yet

States only move forward. Once a ticket is issued, a prefill engine may write into its blocks. They are therefore freed only
when the writer has reported that it writes no more, or when everything has arrived, or when the lease is over (no write begins
after it) and `DisaggregationConfig.grace_s` seconds have passed since.
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
    """The state of a decode-side transfer."""

    ASKED = 0
    """The ranks were ordered to prepare for the transfer."""
    OPEN = 1
    """The ticket is issued."""
    DRAINING = 2
    """The sequence is gone, but the prefill side may still write into its blocks."""
    DONE = 3


@dataclass(eq=False, slots=True)
class DecodeTransfer:
    """The reserved blocks of one prompt, for its positions from `first` on, and the progress of its hand-off."""

    ticket_id: str
    sequence: Sequence
    dp_rank: int
    blocks: list[int]
    ranks: frozenset[int]
    """World ranks that receive a part of the KV."""
    first: int
    lease_ends_s: float
    state: DecodeTransferState = DecodeTransferState.ASKED
    readers: dict[int, KVReader] = field(default_factory=dict)
    arrived: set[int] = field(default_factory=set)
    heartbeat_deadline_s: float = math.inf
    """Latest time for the next heartbeat; infinite once the prefill side has reported that everything is sent."""
    is_committed: bool = False
    """Whether the first token has arrived."""

    @property
    def is_live(self) -> bool:
        """Whether the sequence still waits for this transfer."""
        return self.state < DecodeTransferState.DRAINING

    @property
    def has_arrived(self) -> bool:
        """Whether all ranks that receive a part of the KV have reported that their part has arrived."""
        return self.arrived == self.ranks

    @property
    def ends_s(self) -> float:
        """Time in seconds on the engine's clock at which the transfer is late: the end of the lease, or that of the heartbeat
        timeout if it is earlier and data is missing."""
        return (
            self.lease_ends_s if self.is_committed and self.has_arrived else min(self.lease_ends_s, self.heartbeat_deadline_s)
        )

    def advance(self, state: DecodeTransferState) -> None:
        """Move to the later state `state`. An earlier or equal state is a programming error (`AssertionError`)."""
        assert state > self.state, f"decode transfer {self.ticket_id} cannot go from {self.state.name} to {state.name}"
        self.state = state


@dataclass(slots=True)
class DecodeTransferCounts:
    """Counters of decode-side transfers since the ranks started."""

    made: int = 0
    wait_s: float = 0.0
    """Seconds from the arrival of requests to the reservation of their blocks, summed over requests."""
    completed: int = 0
    fallen_back: int = 0
    """Transfers that the prefill side gave up or that were late, so that this engine computed the prompt itself."""
    outlived: int = 0
    """Transfers drained until lease and grace time were over, because the prefill side never reported the end of its writes."""


class DecodeTransfers:
    """All decode-side transfers of one engine. Not thread-safe: the scheduler's thread calls it."""

    def __init__(self, config: EngineConfig, dp_ranks: list[DPRank]) -> None:
        self.counts = DecodeTransferCounts()
        self.expects: list[KVExpect] = []
        self.forgets: list[str] = []
        """`expects` and `forgets` are orders for the next plan."""
        self._config, self._dp_ranks = config, dp_ranks
        self._open: dict[str, DecodeTransfer] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[DecodeTransfer]:
        return iter(self._open.values())

    def get(self, ticket_id: str) -> DecodeTransfer | None:
        """Return the transfer with the ticket `ticket_id`, or None if it is done or unknown."""
        return self._open.get(ticket_id)

    def is_worth(self, sequence: Sequence) -> bool:
        """Return whether the prompt of an admitted sequence should be handed off to the prefill pool.

        This requires that its request allows it, that it was not tried before, and that at least
        `DisaggregationConfig.least_tokens` of its tokens are in neither the prefix cache nor the KV tiers of this engine. False
        in an engine without a pool.
        """
        disaggregation = self._config.disaggregation
        return disaggregation is not None and sequence.reserves and sequence.todo >= disaggregation.least_tokens

    def reserve(self, sequence: Sequence, now: float) -> None:
        """Begin a transfer into the blocks just allocated to `sequence`, and order the ranks to prepare for it.

        The lease of the blocks starts at `now`, in seconds on the engine's clock.
        """
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
        """Handle a rank's report of the tickets that it is ready for and of those whose bytes have arrived.

        Returns one event, carrying the ticket, for each request all of whose ranks are now ready. `now` (seconds on the
        engine's clock) starts the wait for the first heartbeat.
        """
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
        """Return the sequences of the DP rank with index `dp_rank` whose first token and bytes have all arrived, and end their
        transfers."""
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
        """Handle a sign of life from the prefill side at `now` (seconds on the engine's clock), which defers the heartbeat
        timeout. If `is_sent`, everything is sent and no further heartbeat is expected."""
        transfer.heartbeat_deadline_s = math.inf if is_sent else now + self._disaggregation.heartbeat_timeout_s

    def of(self, sequence: Sequence) -> DecodeTransfer:
        """Return the live transfer of `sequence`, which must be waiting for one (`StopIteration` otherwise)."""
        return next(transfer for transfer in self if transfer.sequence is sequence and transfer.is_live)

    def abandon(self, transfer: DecodeTransfer) -> None:
        """End the wait of the sequence of a live transfer. Its blocks are freed at once if no ticket was issued or everything
        has arrived, else when the prefill side cannot write to them any more."""
        self._dp_ranks[transfer.dp_rank].num_reserved -= 1
        nobody_knows = transfer.state is DecodeTransferState.ASKED
        transfer.advance(DecodeTransferState.DRAINING)
        if nobody_knows or transfer.has_arrived:
            self._free(transfer)

    def close(self, transfer: DecodeTransfer) -> None:
        """Handle the report that the prefill side writes no more for `transfer`: frees its blocks if it is draining, and does
        nothing otherwise."""
        if transfer.state is DecodeTransferState.DRAINING:
            self._free(transfer)

    def expired(self, now: float) -> list[DecodeTransfer]:
        """Return the live transfers that are late at `now`, in seconds on the engine's clock: those whose lease is over, or
        whose heartbeat is overdue while data is missing. They stay live until the caller abandons them.

        Also frees the blocks of draining transfers whose lease and grace time are over.
        """
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
