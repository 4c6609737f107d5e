"""The KV offload manager: decides which blocks are saved to the KV tiers (host memory, disk), and which are fetched back.

    block full, computed ──→ KVSave in the next plan ──→ every rank saves its part (host memory), and shares it (directory)

    admitted: [device hits | expected in a tier | to compute]
                            └─ RESERVED: KVFetch ──→ ranks fill the blocks while others run ──→ minimum of their counts
                                                     then the rest is computed, here or by a prefill side

Blocks that this engine has saved are expected to be in the tiers, up to the capacity of the tiers; blocks that other engines
saved are looked up in the directory. A wrong expectation costs one lookup: the ranks report how many blocks they found, and the
rest is computed. Blocks that are being filled are not reused before every rank has reported, whatever happens to their
sequence. A sequence that has waited for `OffloadConfig.fetch_timeout_s` is computed in other blocks, and the tiers are not
asked again while a rank is late.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from actors.engine.batching.dp_rank import DPRank
from actors.engine.config.engine_config import EngineConfig
from actors.engine.kv.prefix import BlockHash
from actors.engine.sequences.sequence import Sequence
from actors.kv_offload.block_part import KVFormat
from actors.kv_offload.directory import DirectoryTier
from actors.wire.kv import KVFetch, KVReport, KVSave


@dataclass(eq=False, slots=True)
class _Fetch:
    """A fetch that is under way. `blocks` is the whole block table; `sequence` is None if it no longer waits."""

    sequence: Sequence | None
    dp_rank: int
    blocks: list[int]
    hashes: list[BlockHash]
    waiting_for: set[int]
    found: int
    """Number of leading blocks found by all ranks that have reported so far."""
    ends_s: float
    """Time after which its ranks are late."""


@dataclass(slots=True)
class OffloadCounts:
    """Counters of KV offload since the ranks started."""

    saved_blocks: int = 0
    asked_tokens: int = 0
    """Tokens of the blocks requested from the tiers."""
    found_tokens: int = 0
    """Tokens of the blocks found in the tiers."""
    late: int = 0
    """Sequences that gave up waiting for the tiers."""
    hits: Counter[str] = field(default_factory=Counter)
    """Block parts that ranks fetched, by tier, and those that were missed. See `KVReport.tier_hits`."""


@dataclass(slots=True)
class _Believed:
    """The blocks that this engine has saved and expects to be in the tiers: the newest ones, up to the tiers' capacity."""

    capacity: int
    hashes: OrderedDict[BlockHash, None] = field(default_factory=OrderedDict)

    def add(self, block: BlockHash) -> None:
        """Add a block as the newest one. Beyond the capacity the oldest blocks are dropped."""
        self.hashes[block] = None
        self.hashes.move_to_end(block)
        while len(self.hashes) > self.capacity:
            self.hashes.popitem(last=False)


class KVOffloadManager:
    """Manages saving and fetching KV blocks of one engine. Without KV tiers it does nothing.

    Not thread-safe: the scheduler's thread calls it.
    """

    def __init__(self, config: EngineConfig, dp_ranks: list[DPRank]) -> None:
        self.counts = OffloadCounts()
        self.saves: list[KVSave] = []
        self.fetches: list[KVFetch] = []
        """`saves` and `fetches` are orders for the next plan."""
        self._config, self._dp_ranks, self._offload = config, dp_ranks, config.offload
        self._under_way: dict[str, _Fetch] = {}
        self.is_stuck = False
        """Whether a rank was late with a fetch at the last call of `expired`."""
        self._believed = _Believed(config.offload.capacity if config.offload is not None else 0)
        self._doubted: set[BlockHash] = set()
        self._directory: DirectoryTier | None = None
        self._kv_format: KVFormat | None = None
        if config.offload is not None:
            self._kv_format = config.offload.kv_format
            tiers = config.offload.tiers
            if tiers.disk_cache is not None:
                self._directory = DirectoryTier(tiers.disk_cache, tiers.disk_cache_bytes)

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def has_updates(self) -> bool:
        """Whether orders for the ranks (saves or fetches) wait for the next plan, which must be sent even if no sequence
        runs."""
        return bool(self.saves or self.fetches)

    def save(self, sequence: Sequence, places: range) -> None:
        """Order the ranks to save blocks of a sequence that are full and computed, except for those expected in a tier already.

        `places` are the blocks' indices in the sequence's block table. Does nothing without KV tiers.
        """
        if self._offload is None:
            return
        fresh = [place for place in places if not self._is_there(sequence.chain.hashes[place])]
        if fresh:
            hashes = [sequence.chain.hashes[place] for place in fresh]
            for block in hashes:
                self._believed.add(block)
                self._doubted.discard(block)
            self.counts.saved_blocks += len(fresh)
            self.saves.append(
                KVSave(dp_rank=sequence.dp_rank, places=fresh, hashes=hashes, blocks=self._pages(sequence.blocks))
            )

    def num_matched_blocks(self, sequence: Sequence) -> int:
        """Return the number of blocks expected in a tier that directly follow the blocks of an admitted sequence found on the
        device.

        The block of the last token is never included, since its logits are needed. It is 0 if the prompt is scored, if the
        tiers were late for this sequence, or while a rank is late. May list a directory of the disk tier for each block.
        """
        if self._offload is None or sequence.scores_prompt or not self._config.prefix_cache:
            return 0
        if self.is_stuck or sequence.skips_tiers:
            return 0
        first = sequence.num_registered
        wanted = sequence.chain.hashes[first : (len(sequence.tokens) - 1) // self._config.block_size]
        return next((index for index, block in enumerate(wanted) if not self._is_there(block)), len(wanted))

    def fetch(self, sequence: Sequence, count: int, now: float) -> None:
        """Order the ranks to fill the next `count` blocks of a sequence from the tiers. All its blocks must be allocated.

        The fetch is late `OffloadConfig.fetch_timeout_s` seconds after `now`, which is in seconds on the engine's clock.
        """
        assert self._offload is not None
        ticket_id, first = f"{sequence.request.request_id}~{sequence.order}~{sequence.preemptions}", sequence.num_registered
        hashes = sequence.chain.hashes[first : first + count]
        ranks, ends_s = set(self._offload.ranks_of(sequence.dp_rank)), now + self._offload.fetch_timeout_s
        self._under_way[ticket_id] = _Fetch(sequence, sequence.dp_rank, list(sequence.blocks), hashes, ranks, count, ends_s)
        self._dp_ranks[sequence.dp_rank].num_reserved += 1
        self.counts.asked_tokens += count * self._config.block_size
        self.fetches.append(
            KVFetch(
                ticket_id=ticket_id, dp_rank=sequence.dp_rank, first=first, hashes=hashes, blocks=self._pages(sequence.blocks)
            )
        )

    def on_report(self, report: KVReport) -> None:
        """Handle a rank's report of how many blocks of each fetch it has filled. Blocks that were not found are saved again
        once they are computed."""
        for ticket_id, found in report.fetched.items():
            fetch = self._under_way[ticket_id]
            fetch.waiting_for.discard(report.world_rank)
            fetch.found = min(fetch.found, found)
            if not fetch.waiting_for:
                self._doubt(fetch.hashes[fetch.found :])
                if fetch.sequence is None:
                    self._give_back(ticket_id)
        self.counts.hits.update(report.tier_hits)

    def ready(self, dp_rank: int) -> list[Sequence]:
        """Return the sequences of the DP rank with index `dp_rank` whose fetch all ranks have reported, each once. The tokens
        found are counted as computed."""
        done = {name: fetch for name, fetch in self._under_way.items() if fetch.dp_rank == dp_rank and not fetch.waiting_for}
        sequences = []
        for name, fetch in done.items():
            del self._under_way[name]
            if fetch.sequence is not None:
                self._dp_ranks[dp_rank].num_reserved -= 1
                tokens = fetch.found * self._config.block_size
                self.counts.found_tokens += tokens
                fetch.sequence.num_computed += tokens
                fetch.sequence.num_planned = fetch.sequence.num_computed
                if not fetch.sequence.preemptions:
                    fetch.sequence.cached_tokens = fetch.sequence.num_computed
                sequences.append(fetch.sequence)
        return sequences

    def abandon(self, sequence: Sequence) -> bool:
        """End the wait of `sequence` for its fetch. Returns whether it was waiting for one.

        The blocks are freed once all ranks have reported the fetch, since they may still write to them.
        """
        name = next((name for name, fetch in self._under_way.items() if fetch.sequence is sequence), None)
        if name is None:
            return False
        fetch = self._under_way[name]
        fetch.sequence = None
        self._dp_ranks[fetch.dp_rank].num_reserved -= 1
        if not fetch.waiting_for:
            self._give_back(name)
        return True

    def expired(self, now: float) -> list[Sequence]:
        """Return the sequences whose fetch is late at `now`, in seconds on the engine's clock. They lose their blocks, and do
        not use the tiers again. Also sets `is_stuck`."""
        late = [fetch for fetch in self._under_way.values() if fetch.waiting_for and now >= fetch.ends_s]
        self.is_stuck = bool(late)
        sequences = [fetch.sequence for fetch in late if fetch.sequence is not None]
        for sequence in sequences:
            self.counts.late += 1
            self.abandon(sequence)
            sequence.skips_tiers = True
        return sequences

    def _give_back(self, ticket_id: str) -> None:
        fetch = self._under_way.pop(ticket_id)
        self._dp_ranks[fetch.dp_rank].pool.free(fetch.blocks)

    def _doubt(self, hashes: list[BlockHash]) -> None:
        """Mark blocks as missing or incomplete in the tiers, so that they are saved again when they are computed."""
        self._doubted.update(hashes)
        for block in hashes:
            self._believed.hashes.pop(block, None)

    def _is_there(self, block: BlockHash) -> bool:
        if block in self._believed.hashes or block in self._doubted:
            return block not in self._doubted
        if self.is_stuck:  # a rank hangs on the tiers, and this thread must not
            return False
        return (
            self._directory is not None
            and self._kv_format is not None
            and bool(self._directory.parts(self._kv_format.name(block)))
        )

    def _pages(self, blocks: list[int]) -> list[int]:
        return [block // self._config.kv_owners for block in blocks]
