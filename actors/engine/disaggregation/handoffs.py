"""Prefill/decode disaggregation and KV offloading in the engine: prompts on their way in, prompts on their way out, blocks
that are fetched.

Three books, each with its own states; together they say what the next plan tells the ranks, and what there is to count.
"""

from __future__ import annotations

from actors.engine.batching.dp_rank import DPRank
from actors.engine.config.engine_config import EngineConfig
from actors.engine.config.stats import HandoffStats
from actors.engine.disaggregation.decode_transfers import DecodeTransfers
from actors.engine.disaggregation.offload_manager import KVOffloadManager
from actors.engine.disaggregation.prefill_transfers import PrefillTransfers


class Handoffs:
    """The books. The scheduler writes in each of them directly."""

    def __init__(self, config: EngineConfig, dp_ranks: list[DPRank]) -> None:
        self.decode_transfers = DecodeTransfers(config, dp_ranks)
        self.prefill_transfers = PrefillTransfers(config, dp_ranks)
        self.offload = KVOffloadManager(config, dp_ranks)

    def __bool__(self) -> bool:
        """Whether anything is under way: something may have to be done though nothing is in flight."""
        return bool(self.decode_transfers) or bool(self.prefill_transfers) or bool(self.offload)

    @property
    def has_updates(self) -> bool:
        """Whether ranks must hear of something though no sequence runs. What is to be sent comes with one that starts."""
        decode, prefill = self.decode_transfers, self.prefill_transfers
        return bool(decode.expects or decode.forgets or prefill.forgets) or self.offload.has_updates

    def drain_updates(self) -> dict[str, object]:
        """What the next plan says of them, once."""
        decode, prefill, offload = self.decode_transfers, self.prefill_transfers, self.offload
        updates = {"expects": decode.expects, "sends": prefill.sends, "forgets": decode.forgets + prefill.forgets}
        updates |= {"saves": offload.saves, "fetches": offload.fetches}
        decode.expects, decode.forgets, prefill.sends, prefill.forgets = [], [], [], []
        offload.saves, offload.fetches = [], []
        return updates

    def stats(self) -> HandoffStats:
        """Numbers of both sides of hand-offs."""
        decode, prefill = self.decode_transfers.counts, self.prefill_transfers.counts
        reserved = sum(transfer.is_live for transfer in self.decode_transfers)
        return HandoffStats(
            reserved=reserved,
            draining=len(self.decode_transfers) - reserved,
            sending=len(self.prefill_transfers),
            reservations=decode.made,
            reservation_wait_s=decode.wait_s,
            received=decode.completed,
            fallen_back=decode.fallen_back,
            outlived=decode.outlived,
            sent=prefill.completed,
            failed=prefill.failed,
            sent_bytes=prefill.num_bytes,
            transfer_s=prefill.busy_s,
            exposed_s=prefill.exposed_s,
            overlap=prefill.overlap,
        )
