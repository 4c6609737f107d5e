"""What the scheduler asks about KV blocks that come from elsewhere, or go there: the scheduler side of a KV connector.

    admitted ──load──→ waits for its blocks ──loaded──→ running      blocks come from a prefill pool or a KV tier
        └──────────────────not loaded─────────────────────┘
    running ──save──→ blocks of computed tokens go to the KV tiers
    running ──started … finish──→ blocks of a whole prompt go to a decode pool; its last event waits until they are there

`Handoffs` is the one that serves pools and tiers. `NoKVConnector` is that of an engine on its own.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Protocol

from actors.engine.sequences.sequence import Sequence
from actors.wire.requests import TokenEvent


class SchedulerKVConnector(Protocol):
    """The six questions of the scheduler. Called by its thread only."""

    def load(self, sequence: Sequence, now: float) -> bool:
        """Whether somebody else fills blocks of a sequence that was just given all of its blocks. If so, it waits for them."""

    def loaded(self, dp_rank: int, now: float) -> list[Sequence]:
        """The sequences of a DP rank whose blocks have been filled, each once: they run, from their first token not
        computed."""

    def started(self, sequence: Sequence, now: float) -> None:
        """A sequence begins to run: the next plan tells the ranks of it."""

    def save(self, sequence: Sequence, places: range) -> None:
        """The blocks at these places of a sequence's block table are full and computed for the first time."""

    def finish(self, sequence: Sequence, last: TokenEvent) -> list[TokenEvent]:
        """A sequence that is still in its state ends with `last`: the events that go out now. The others follow later."""

    def plan_fields(self) -> dict[str, object]:
        """The fields of the next `StepPlan` about such blocks, each order once. Empty where there is nothing to order."""


class NoKVConnector:
    """Nothing comes from elsewhere and nothing goes there."""

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
    """What came of transfers. To be given to `Scheduler.apply` before the connector is called again."""

    events: Several[TokenEvent] = ()
    """To be delivered as they are."""
    first_tokens: Several[tuple[Sequence, TokenEvent]] = ()
    """Sequences whose prompt was computed elsewhere, and the event that carries their first token."""
    failed: Several[Sequence] = ()
    """Sequences that wait for blocks which will not come: they are computed here."""
    dropped: Several[Sequence] = ()
    """Sequences whose blocks nobody takes any more: they end without an event of their own."""
