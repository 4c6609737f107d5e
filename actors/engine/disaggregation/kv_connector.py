"""The scheduler side of a KV connector: the interface through which the scheduler has KV blocks loaded, saved and sent.

    admitted ──load──→ waits for its blocks ──loaded──→ running      blocks come from a prefill pool or a KV tier
        └──────────────────not loaded─────────────────────┘
    running ──save──→ blocks of computed tokens go to the KV tiers
    running ──started … finish──→ blocks of a whole prompt go to a decode pool; its last event waits until they are sent

`engine_kv_connector.py` implements it for pools and KV tiers, and `NoKVConnector` for an engine that has neither.
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
        """Start to load KV into the blocks that `sequence` was just allocated, from a KV tier or a prefill pool.

        Returns whether anything is loaded. If so, the sequence waits until `loaded` returns it. `now` is in seconds on the
        engine's clock, here and in the other methods.
        """

    def loaded(self, dp_rank: int, now: float) -> list[Sequence]:
        """Return the sequences of the DP rank with index `dp_rank` whose blocks have been filled, each once.

        They run from their first token that is not computed.
        """

    def started(self, sequence: Sequence, now: float) -> None:
        """Handle the start of `sequence`, which the next plan sends to the ranks. If its request has a KV transfer ticket, its
        KV is sent to the decode pool as it is computed."""

    def save(self, sequence: Sequence, places: range) -> None:
        """Order the ranks to save blocks of a sequence, which are full and computed for the first time, to the KV tiers.
        `places` are their indices in the sequence's block table."""

    def finish(self, sequence: Sequence, last: TokenEvent) -> list[TokenEvent]:
        """Handle the end of a sequence, before the scheduler changes its state. `last` is its last event.

        Returns the events to deliver now. While the sequence's blocks are being sent, `last` is not among them: the connector
        delivers it once they are sent.
        """

    def plan_fields(self) -> dict[str, object]:
        """Return the fields of the next `StepPlan` that order KV transfers, by field name, and forget these orders. Empty if
        there are none."""


class NoKVConnector:
    """The KV connector of an engine without pools and KV tiers. It does nothing."""

    def load(self, sequence: Sequence, now: float) -> bool:
        """See `SchedulerKVConnector.load`. Returns false."""
        return False

    def loaded(self, dp_rank: int, now: float) -> list[Sequence]:
        """See `SchedulerKVConnector.loaded`. Returns an empty list."""
        return []

    def started(self, sequence: Sequence, now: float) -> None:
        """See `SchedulerKVConnector.started`. Does nothing."""
        pass

    def save(self, sequence: Sequence, places: range) -> None:
        """See `SchedulerKVConnector.save`. Does nothing."""
        pass

    def finish(self, sequence: Sequence, last: TokenEvent) -> list[TokenEvent]:
        """See `SchedulerKVConnector.finish`. Returns only `last`."""
        return [last]

    def plan_fields(self) -> dict[str, object]:
        """See `SchedulerKVConnector.plan_fields`. Returns an empty dict."""
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
