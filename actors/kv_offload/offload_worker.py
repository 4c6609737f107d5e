"""The worker side of KV offload: one rank saves the blocks that plans name, and fetches blocks while steps run.

    plan ──saves────→ copied to host memory before the step, so that the pages can be reused at once
         ──fetches──→ (a thread) ──→ pages filled ──→ KVReport.fetched: number of blocks

The pages of a fetch belong to a sequence that no plan runs before every rank has reported its fetch.
"""

from __future__ import annotations

import logging
import queue
from collections import Counter
from threading import Lock, Thread

import torch

from actors.kv_offload.block_part import KVFormat
from actors.kv_offload.directory import DirectoryTier
from actors.kv_offload.host import HostTier
from actors.kv_offload.rank_blocks import RankBlocks
from actors.kv_offload.tiers import Tiers
from actors.model.kv.kv_caches import KVCaches
from actors.wire.kv import KVFetch, KVReport
from actors.wire.plans import StepPlan
from actors.wire.rank_config import RankConfig
from actors.wire.tier_config import TierConfig
from placement.ownership.handoff import holdings
from placement.ownership.handoff_pages import PageTable
from placement.ownership.rank_identity import RankIdentity

logger = logging.getLogger(__name__)


class KVOffloadWorker:
    """The KV offload of one rank. Its methods are called from the rank's thread. `model_digest` identifies the model in the
    names of blocks (`placement.model.digest`)."""

    def __init__(
        self, config: RankConfig, identity: RankIdentity, cache: KVCaches, settings: TierConfig, model_digest: str
    ) -> None:
        side = identity.side
        self._rank, self._dp_rank, self._device = config.world_rank, side.dp_rank, torch.device(config.device)
        self._held = next(held for held in holdings(config.spec, side) if held.world_rank == config.world_rank)
        self._kv_format = KVFormat.of(config.spec, model_digest, config.dtype, config.block_size)
        shared = None if settings.disk_cache is None else DirectoryTier(settings.disk_cache, settings.disk_cache_bytes)
        self.tiers = Tiers(self._kv_format, HostTier(settings.host_cache), shared)
        first_head = self._held.kv_heads.start
        self._blocks = RankBlocks(self.tiers, config.spec, side, config.world_rank, cache.parts[0], first_head)
        self._asked: queue.SimpleQueue[KVFetch | None] = queue.SimpleQueue()
        self._done: dict[str, int] = {}
        self._lock = Lock()
        self._num_open = 0
        self._reported_hits: Counter[str] = Counter()
        self._thread = Thread(target=self._work, name=f"kv-tiers-{self._rank}", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether a fetch has not been reported by `poll` yet, so that it must be called."""
        return self._num_open > 0

    def before(self, plan: StepPlan) -> None:
        """Save the blocks that `plan` names for this rank's DP rank, and begin its fetches on the worker's thread. Called
        before the step; returns once the values are copied to host memory."""
        for save in plan.saves:
            if save.dp_rank == self._dp_rank:
                table = PageTable(self._held.ownership, save.blocks)
                for place, block in zip(save.places, save.hashes, strict=True):
                    self._blocks.save(range(place, place + 1), [self._kv_format.name(block)], table)
        for fetch in plan.fetches:
            if fetch.dp_rank == self._dp_rank:
                self._num_open += 1
                self._asked.put(fetch)

    def poll(self) -> KVReport | None:
        """Returns the number of blocks found by each fetch that has completed since the last call, with the tier statistics
        since the last report; None if no fetch has completed. Never blocks."""
        with self._lock:
            done, self._done = self._done, {}
        self._num_open -= len(done)
        if not done:
            return None
        hits = Counter({**self.tiers.hits, "unwritten": self.tiers.num_unwritten})
        fresh, self._reported_hits = dict(hits - self._reported_hits), hits
        return KVReport(world_rank=self._rank, fetched=done, tier_hits=fresh)

    def close(self) -> None:
        """End the thread after its fetches, and write all queued parts to the shared tier. Raises `TimeoutError` if the writes
        take longer than 30 seconds."""
        self._asked.put(None)
        self._thread.join()
        self.tiers.close()

    def _work(self) -> None:
        while (fetch := self._asked.get()) is not None:
            found = self._fetched(fetch)
            with self._lock:
                self._done[fetch.ticket_id] = found

    def _fetched(self, fetch: KVFetch) -> int:
        table = PageTable(self._held.ownership, fetch.blocks)
        names = [self._kv_format.name(block) for block in fetch.hashes]
        try:
            with torch.inference_mode():
                found = self._blocks.load(range(fetch.first, fetch.first + len(names)), names, table)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except Exception:  # a failing tier is a miss: the prompt can still be computed
            logger.exception("blocks of %s could not be fetched", fetch.ticket_id)
            return 0
        return found


class NoKVOffloadWorker:
    """The KV offload of a rank without tiers."""

    is_busy = False

    def before(self, plan: StepPlan) -> None:
        """See `KVOffloadWorker.before`. Does nothing."""

    def poll(self) -> KVReport | None:
        """See `KVOffloadWorker.poll`. Returns None."""
        return None

    def close(self) -> None:
        """See `KVOffloadWorker.close`. Does nothing."""
