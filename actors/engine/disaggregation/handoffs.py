"""Prefill/decode disaggregation and KV offloading in the engine: prompts on their way in, prompts on their way out, blocks that are fetched.

Three books, each with its own states; together they say what the next plan tells the ranks, and what there is to count.
"""

from __future__ import annotations

from actors.engine.batching.lane import Lane
from actors.engine.config.engine_config import EngineConfig
from actors.engine.config.stats import HandoffStats
from actors.engine.disaggregation.offload_manager import KVOffloadManager
from actors.engine.disaggregation.outgoing import Outgoings
from actors.engine.disaggregation.reservations import Reservations


class Handoffs:
    """The books. The scheduler writes in each of them directly."""

    def __init__(self, config: EngineConfig, lanes: list[Lane]) -> None:
        self.reservations = Reservations(config, lanes)
        self.outgoing = Outgoings(config, lanes)
        self.offload = KVOffloadManager(config, lanes)

    def __bool__(self) -> bool:
        """Whether anything is under way: something may have to be done though nothing is in flight."""
        return bool(self.reservations) or bool(self.outgoing) or bool(self.offload)

    @property
    def has_updates(self) -> bool:
        """Whether ranks must hear of something though no sequence runs. What is to be sent comes with one that starts."""
        into, out = self.reservations, self.outgoing
        return bool(into.expects or into.forgets or out.forgets) or self.offload.has_updates

    def drain_updates(self) -> dict[str, object]:
        """What the next plan says of them, once."""
        into, out, offload = self.reservations, self.outgoing, self.offload
        updates = {"expects": into.expects, "sends": out.sends, "forgets": into.forgets + out.forgets}
        updates |= {"saves": offload.saves, "fetches": offload.fetches}
        into.expects, into.forgets, out.sends, out.forgets = [], [], [], []
        offload.saves, offload.fetches = [], []
        return updates

    def stats(self) -> HandoffStats:
        """Numbers of both sides of hand-offs."""
        into, out = self.reservations.counts, self.outgoing.counts
        reserved = sum(made.is_live for made in self.reservations)
        return HandoffStats(
            reserved=reserved,
            draining=len(self.reservations) - reserved,
            sending=len(self.outgoing),
            reservations=into.made,
            reservation_wait_s=into.wait_s,
            received=into.completed,
            fallen_back=into.fallen_back,
            outlived=into.outlived,
            sent=out.completed,
            failed=out.failed,
            sent_bytes=out.num_bytes,
            transfer_s=out.busy_s,
            exposed_s=out.exposed_s,
            overlap=out.overlap,
        )
