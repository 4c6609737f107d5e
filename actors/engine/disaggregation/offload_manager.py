"""Blocks that outlive the device: which are put away in the tiers behind it, and which are fetched back for a prompt.

    block full, computed ──→ KVSave in the next plan ──→ every rank keeps its part (host memory), and shares it (directory)

    admitted: [device hits | believed in a tier | to compute]
                            └─ RESERVED: KVFetch ──→ ranks fill the blocks while others run ──→ the least of their counts
                                                     then the rest is computed, here or by a prefill side

What this engine had saved it believes to be there, as much as the tiers hold; what others saved it sees in the directory. To
be wrong costs a look: ranks say how many blocks they found, and the rest is computed. Blocks that are being filled go to
nobody else before every rank has said so, whatever becomes of their sequence: one that has waited
`OffloadConfig.fetch_timeout_s` is computed in other blocks, and nobody asks the tiers while a rank still owes an answer.
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
    """`blocks`: the whole table; None for `sequence`: it wants them no longer."""

    sequence: Sequence | None
    dp_rank: int
    blocks: list[int]
    hashes: list[BlockHash]
    waiting_for: set[int]
    found: int
    """Blocks that all ranks heard of so far have."""
    ends_s: float
    """When its ranks are late."""


@dataclass(slots=True)
class OffloadCounts:
    """What happened since the engine was made. Tokens of blocks asked of the tiers, and of those found in them."""

    saved_blocks: int = 0
    asked_tokens: int = 0
    found_tokens: int = 0
    late: int = 0
    """Sequences that gave up waiting."""
    hits: Counter[str] = field(default_factory=Counter)
    """Block parts that ranks fetched, by the tier they came from, and those that were missed."""


@dataclass(slots=True)
class _Believed:
    """Blocks that this engine has saved: as many of the newest as the tiers hold."""

    capacity: int
    hashes: OrderedDict[BlockHash, None] = field(default_factory=OrderedDict)

    def add(self, block: BlockHash) -> None:
        self.hashes[block] = None
        self.hashes.move_to_end(block)
        while len(self.hashes) > self.capacity:
            self.hashes.popitem(last=False)


class KVOffloadManager:
    """Not thread-safe: the scheduler's thread calls it. Without tiers it never has anything to do."""

    def __init__(self, config: EngineConfig, dp_ranks: list[DPRank]) -> None:
        self.counts = OffloadCounts()
        self.saves: list[KVSave] = []
        self.fetches: list[KVFetch] = []
        """Both: for the next plan."""
        self._config, self._dp_ranks, self._offload = config, dp_ranks, config.offload
        self._under_way: dict[str, _Fetch] = {}
        self.is_stuck = False
        """Whether a rank was late at the last look, and still is."""
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
        """Whether ranks must hear of something though no sequence runs."""
        return bool(self.saves or self.fetches)

    def save(self, sequence: Sequence, places: range) -> None:
        """Blocks of a sequence are full and computed: put away those that are not yet."""
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
        """Blocks behind those found on the device that a tier is believed to have. Never the last token's."""
        if self._offload is None or sequence.scores_prompt or not self._config.prefix_cache:
            return 0
        if self.is_stuck or sequence.skips_tiers:
            return 0
        first = sequence.num_registered
        wanted = sequence.chain.hashes[first : (len(sequence.tokens) - 1) // self._config.block_size]
        return next((index for index, block in enumerate(wanted) if not self._is_there(block)), len(wanted))

    def fetch(self, sequence: Sequence, count: int, now: float) -> None:
        """Have `count` blocks of a sequence, which has them all, filled."""
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
        """How many blocks of each fetch a rank has filled."""
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
        """The sequences of a DP rank whose blocks are filled: they leave, with what was found counted as computed."""
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
        """A sequence wants its blocks no longer; whether it was waiting here for them."""
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
        """The sequences whose blocks did not come in time: they leave, without blocks, and ask the tiers no more."""
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
        """They were not there, or not whole: put away again when they are computed."""
        self._doubted.update(hashes)
        for block in hashes:
            self._believed.hashes.pop(block, None)

    def _is_there(self, block: BlockHash) -> bool:
        if block in self._believed.hashes or block in self._doubted:
            return block not in self._doubted
        if self.is_stuck:  # this thread must not hang where a rank may
            return False
        return (
            self._directory is not None
            and self._kv_format is not None
            and bool(self._directory.parts(self._kv_format.name(block)))
        )

    def _pages(self, blocks: list[int]) -> list[int]:
        return [block // self._config.kv_owners for block in blocks]
