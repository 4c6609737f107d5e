"""Decode side of prefill/decode disaggregation: blocks that an engine has reserved for prompts which a prefill pool computes.

    reserve ──→ ASKED ──all ranks ready──→ OPEN ──first token, and all bytes here──→ DONE   (the sequence runs)
                  │                         │
                  │ never told to anyone    │ cancelled, failed, lease over
                  ↓                         ↓
                 DONE ←─────────────────  DRAINING: the sequence has left, its blocks have not

Stages only move forward. While a ticket is out somebody may write into its blocks, so they go to nobody else before the
writer has said that it writes no more, or everything has arrived, or the lease is over (no write begins after it) and
`Pool.grace_s` has passed on top.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from actors.engine.batching.lane import Lane
from actors.engine.config.engine_config import EngineConfig, Pool
from actors.engine.sequences.sequence import Sequence
from actors.wire.kv import KVExpect, KVReader, KVReport, KVTicket
from actors.wire.requests import TokenEvent


class Stage(IntEnum):
    ASKED = 0
    """The ranks are told to be ready."""
    OPEN = 1
    """The ticket is out."""
    DRAINING = 2
    DONE = 3


@dataclass(eq=False, slots=True)
class Reservation:
    """Blocks for the positions from `first` on of one prompt, and how far its hand-off is."""

    ticket_id: str
    sequence: Sequence
    lane: int
    blocks: list[int]
    ranks: frozenset[int]
    """World ranks that get a part of it."""
    first: int
    lease_ends_s: float
    stage: Stage = Stage.ASKED
    readers: dict[int, KVReader] = field(default_factory=dict)
    arrived: set[int] = field(default_factory=set)
    heartbeat_deadline_s: float = math.inf
    """When the next heartbeat is due at the latest; infinite once it has said that all is sent."""
    is_committed: bool = False
    """The first token is here."""

    @property
    def is_live(self) -> bool:
        """Whether its sequence still waits for it."""
        return self.stage < Stage.DRAINING

    @property
    def has_arrived(self) -> bool:
        return self.arrived == self.ranks

    @property
    def ends_s(self) -> float:
        """When it is late. All that is here needs no heartbeat."""
        return (
            self.lease_ends_s if self.is_committed and self.has_arrived else min(self.lease_ends_s, self.heartbeat_deadline_s)
        )

    def move(self, stage: Stage) -> None:
        """On to a later stage."""
        assert stage > self.stage, f"reservation {self.ticket_id} cannot go from {self.stage.name} to {stage.name}"
        self.stage = stage


@dataclass(slots=True)
class ReservationCounts:
    """What happened since the engine was made."""

    made: int = 0
    wait_s: float = 0.0
    """From the arrival of requests to their blocks, summed."""
    completed: int = 0
    fallen_back: int = 0
    """Given up by the prefill side, or too late: this engine computed the prompt itself."""
    outlived: int = 0
    """Drained until the lease was over, since nobody said that it would not write."""


class Reservations:
    """All reservations of one engine. Not thread-safe: the scheduler's thread calls it."""

    def __init__(self, config: EngineConfig, lanes: list[Lane]) -> None:
        self.counts = ReservationCounts()
        self.expects: list[KVExpect] = []
        self.forgets: list[str] = []
        """Both: for the next plan."""
        self._config, self._lanes = config, lanes
        self._open: dict[str, Reservation] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._open.values())

    def get(self, ticket_id: str) -> Reservation | None:
        """The one with that ticket, unless it is done."""
        return self._open.get(ticket_id)

    def is_worth(self, sequence: Sequence) -> bool:
        """The rule: a prompt is handed off if this engine has `Pool.least_tokens` of it or more in neither cache nor tiers."""
        pool = self._config.pool
        return pool is not None and sequence.reserves and sequence.todo >= pool.least_tokens

    def reserve(self, sequence: Sequence, now: float) -> None:
        """Keep the blocks that `sequence` has just got in its lane for its prompt, and have the ranks be ready for it."""
        pool, request = self._pool, sequence.request
        lane = self._lanes[sequence.lane]
        made = Reservation(
            ticket_id=f"{request.request_id}~{sequence.order}",
            sequence=sequence,
            lane=lane.index,
            blocks=list(sequence.blocks),
            ranks=pool.ranks_of(lane.index),
            first=sequence.num_computed,
            lease_ends_s=now + pool.lease_s,
        )
        lane.num_reserved += 1
        self._open[made.ticket_id] = made
        self.counts.made += 1
        self.counts.wait_s += now - sequence.arrival_s
        self.expects.append(
            KVExpect(
                ticket_id=made.ticket_id,
                lane=lane.index,
                blocks=self._pages(made),
                first=made.first,
                tokens=sequence.prompt_length,
            )
        )

    def on_report(self, report: KVReport, now: float) -> list[TokenEvent]:
        """What a rank tells. The events are tickets that can go out."""
        events = []
        for ticket_id, reader in report.opened.items():
            made = self._open.get(ticket_id)
            if made is not None and made.stage is Stage.ASKED:
                made.readers[report.world_rank] = reader
                if made.readers.keys() == made.ranks:
                    made.move(Stage.OPEN)
                    made.heartbeat_deadline_s = now + self._pool.first_heartbeat_timeout_s
                    events.append(TokenEvent(request_id=made.sequence.request.request_id, ticket=self._ticket(made, now)))
        for ticket_id in report.arrived:
            made = self._open.get(ticket_id)
            if made is not None:
                made.arrived.add(report.world_rank)
                if made.stage is Stage.DRAINING and made.has_arrived:
                    self._free(made)
        return events

    def ready(self, lane: int) -> list[Sequence]:
        """The sequences of a lane that can run: they leave, with their blocks."""
        found = [made for made in self if made.lane == lane and made.is_committed and made.has_arrived and made.is_live]
        for made in found:
            made.move(Stage.DONE)
            del self._open[made.ticket_id]
            self._lanes[lane].num_reserved -= 1
            self.counts.completed += 1
        return [made.sequence for made in found]

    def on_heartbeat(self, made: Reservation, is_sent: bool, now: float) -> None:
        """Whoever has its ticket lives, or has nothing more to say of it."""
        made.heartbeat_deadline_s = math.inf if is_sent else now + self._pool.heartbeat_timeout_s

    def of(self, sequence: Sequence) -> Reservation:
        """That of a reserved sequence."""
        return next(made for made in self if made.sequence is sequence and made.is_live)

    def abandon(self, made: Reservation) -> None:
        """Its sequence wants it no longer. The blocks stay until nobody can write to them."""
        self._lanes[made.lane].num_reserved -= 1
        nobody_knows = made.stage is Stage.ASKED
        made.move(Stage.DRAINING)
        if nobody_knows or made.has_arrived:
            self._free(made)

    def close(self, made: Reservation) -> None:
        """The writer writes no more."""
        if made.stage is Stage.DRAINING:
            self._free(made)

    def expired(self, now: float) -> list[Reservation]:
        """Those still live whose lease is over before all was here, or whose heartbeat is overdue; drained
        ones past their grace are done."""
        late = [made for made in self if now >= made.ends_s]
        for made in late:
            if made.stage is Stage.DRAINING and now >= made.lease_ends_s + self._pool.grace_s:
                self.counts.outlived += 1
                self._free(made)
        return [made for made in late if made.is_live]

    @property
    def _pool(self) -> Pool:
        assert self._config.pool is not None, "an engine without a pool reserves nothing"
        return self._config.pool

    def _free(self, made: Reservation) -> None:
        if not made.has_arrived:
            self.forgets.append(made.ticket_id)
        made.move(Stage.DONE)
        del self._open[made.ticket_id]
        self._lanes[made.lane].pool.free(made.blocks)

    def _pages(self, made: Reservation) -> list[int]:
        return [block // self._config.kv_owners for block in made.blocks]

    def _ticket(self, made: Reservation, now: float) -> KVTicket:
        sequence = made.sequence
        return KVTicket(
            ticket_id=made.ticket_id,
            layout=str(self._pool.layout),
            page_tokens=self._config.block_size,
            lane=made.lane,
            blocks=self._pages(made),
            first=made.first,
            tokens=sequence.prompt_length,
            rope_length=sequence.rope_length,
            readers=[made.readers[rank] for rank in sorted(made.readers)],
            lease_s=made.lease_ends_s - now,
        )
