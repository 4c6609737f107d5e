"""The scheduler side of a KV connector: the interface through which the scheduler has KV blocks loaded, saved and sent.

    admitted ──load──→ waits for its blocks ──loaded──→ running      blocks come from a prefill pool or a KV tier
        └──────────────────not loaded─────────────────────┘
    running ──save──→ blocks of computed tokens go to the KV tiers
    running ──started … finish──→ blocks of a whole prompt go to a decode pool; its last event waits until they are sent

`Handoffs` implements it for pools and KV tiers, and `NoKVConnector` for an engine that has neither.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Protocol

from actors.engine.sequences.sequence import Sequence
from actors.wire.requests import TokenEvent


class SchedulerKVConnector(Protocol):
    """The interface of a KV connector for the scheduler. Not thread-safe: only the scheduler's thread calls it."""

    def load(self, sequence: Sequence, now: float) -> bool:
        """Start to load KV into the blocks that a sequence was just allocated, from a KV tier or a prefill pool.

        Returns whether anything is loaded. If so, the sequence waits until `loaded` returns it.
        """

    def loaded(self, dp_rank: int, now: float) -> list[Sequence]:
        """Return the sequences of a DP rank whose blocks have been filled, each once.

        They run from their first token that is not computed.
        """

    def started(self, sequence: Sequence, now: float) -> None:
        """Handle the start of a sequence, which the next plan sends to the ranks."""

    def save(self, sequence: Sequence, places: range) -> None:
        """Save the blocks at indices `places` of a sequence's block table, which are full and computed for the first time."""

    def finish(self, sequence: Sequence, last: TokenEvent) -> list[TokenEvent]:
        """Handle the end of a sequence with the event `last`, before the scheduler changes the sequence's state.

        Returns the events to deliver now. The connector delivers any others later.
        """

    def plan_fields(self) -> dict[str, object]:
        """Return the fields of the next `StepPlan` that order KV transfers, each order once. Empty if there are none."""


class NoKVConnector:
    """The KV connector of an engine without pools and KV tiers. It does nothing."""

    def load(self, sequence: Sequence, now: float) -> bool:
        return False

    def loaded(self, dp_rank: int, now: float) -> list[Sequence]:
        return []

    def started(self, sequence: Sequence, now: float) -> None:
        pass

    def save(self, sequence: Sequence, places: range) -> None:
        pass

    def finish(self, sequence: Sequence, last: TokenEvent) -> list[TokenEvent]:
        return [last]

    def plan_fields(self) -> dict[str, object]:
        return {}


@dataclass(frozen=True, slots=True)
class TransferChanges:
    """The outcome of KV transfers. Pass it to `Scheduler.apply` before the connector is called again."""

    events: Several[TokenEvent] = ()
    """Events to deliver unchanged."""
    first_tokens: Several[tuple[Sequence, TokenEvent]] = ()
    """Sequences whose prompt a prefill engine has computed, each with the event that carries its first token."""
    failed: Several[Sequence] = ()
    """Sequences whose blocks will not be filled, so that this engine computes them."""
    dropped: Several[Sequence] = ()
    """Sequences whose transfer to a decode engine failed: they end without an event of their own."""
