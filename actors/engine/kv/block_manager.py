"""The block manager (`BlockPool`) of one DP rank: allocation, reference counts, prefix-cache lookup, and LRU eviction.

          allocate                       free (last reference)
    blank ────────→ in use (refs > 0) ──────────────────────→ cached, if registered  (least recent first)
      ↑                  ↑     │                                │  │
      └──────────────────┼─────┘ free, never registered         │  │ allocate, once no block is blank: evict
                         └──────── acquire (a hit) ─────────────┘  └──→ in use under a new owner

Every block is in exactly one of the three states, so ``blank + cached + in use == num_blocks`` always.

With context parallelism each of `owners` ranks holds its own pages, and block j of a sequence must belong to owner
``j % owners``. Blocks are numbered across all owners; the owning rank identifies a block by its index in its own pages::

    owners=2    block     0  1  2  3  4  5           a sequence of three blocks: [4, 1, 0]
                owner     0  1  0  1  0  1   = block % owners
                page      0  0  1  1  2  2   = block // owners
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from actors.engine.kv.prefix import BlockHash


class BlockPool:
    """A pool of `blocks_each` KV blocks per owner, with reference counts and an index of blocks by prefix hash."""

    def __init__(self, blocks_each: int, owners: int = 1) -> None:
        self.num_blocks = blocks_each * owners
        """Number of blocks of all owners together."""
        self.owners = owners
        self._blank = [list(range(self.num_blocks - owners + owner, -1, -owners)) for owner in range(owners)]
        self._cached: list[dict[int, None]] = [{} for _ in range(owners)]
        """Unreferenced but registered blocks, by owner, in order of eviction (a dict keeps insertion order)."""
        self._refs = [0] * self.num_blocks
        self._name_of: dict[int, BlockHash] = {}
        self._block_of: dict[BlockHash, int] = {}

    @property
    def num_blank(self) -> int:
        """Number of blocks that hold no KV."""
        return sum(map(len, self._blank))

    @property
    def num_cached(self) -> int:
        """Number of unreferenced blocks that the prefix cache can still hit."""
        return sum(map(len, self._cached))

    @property
    def num_available(self) -> int:
        """Number of blocks that `allocate` can return, over all owners."""
        return self.num_blank + self.num_cached

    @property
    def num_held(self) -> int:
        """Number of blocks that at least one sequence holds."""
        return self.num_blocks - self.num_available

    def count_held(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks` (block numbers) are held by at least one sequence."""
        return sum(self._refs[block] > 0 for block in blocks)

    def has_room(self, places: range, hits: Iterable[int] = (), growing: Iterable[int] = ()) -> bool:
        """Return whether every owner has enough blocks for `places` (indices in a block table) once the cached blocks `hits`
        are acquired.

        `growing` holds the indices, in their block tables, of blocks that other sequences must still be able to allocate
        afterwards.
        """
        left = [len(blank) + len(cached) for blank, cached in zip(self._blank, self._cached, strict=True)]
        for block in hits:
            left[block % self.owners] -= block in self._cached[block % self.owners]
        for owner in range(self.owners):
            left[owner] -= len(places[(owner - places.start) % self.owners :: self.owners])
        for place in growing:
            left[place % self.owners] -= 1
        return min(left) >= 0

    def lookup(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Return the blocks of the longest registered prefix of the hash chain `hashes`, in order, without taking
        references."""
        hits = []
        for name in hashes:
            block = self._block_of.get(name)
            if block is None:
                break
            hits.append(block)
        return hits

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of `blocks`, which `lookup` returned. Cached ones among them can then not be evicted."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block % self.owners][block]
            self._refs[block] += 1

    def allocate(self, places: range) -> list[int]:
        """Return a new block for each of `places` (indices in a sequence's block table, which decide the owner), with one
        reference each. Cached blocks are evicted where no blank one is left. `has_room` must be true (`AssertionError`
        otherwise)."""
        assert self.has_room(places), f"blocks asked for places {places}, {self.num_available} available"
        return [self._take(place % self.owners) for place in places]

    def _take(self, owner: int) -> int:
        block = self._blank[owner].pop() if self._blank[owner] else self._evict(owner)
        self._refs[block] = 1
        return block

    def _evict(self, owner: int) -> int:
        block = next(iter(self._cached[owner]))
        del self._cached[owner][block]
        del self._block_of[self._name_of.pop(block)]
        return block

    def register(self, block: int, name: BlockHash) -> None:
        """Make `block`, which is full, computed and held by a sequence, findable under `name`, its prefix hash. Does nothing if
        another block has this name, or the block has one."""
        assert self._refs[block] > 0, f"block {block} is registered but nobody holds it"
        if name not in self._block_of and block not in self._name_of:
            self._block_of[name] = block
            self._name_of[block] = name

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of `blocks`, which are given in sequence order. Blocks without a reference become cached
        if they are registered, else blank. `AssertionError` for a block without a reference.

        The last block is freed first, and so evicted first: a prefix hit needs the first blocks of a sequence.
        """
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} is freed twice"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._name_of:
                    self._cached[block % self.owners][block] = None
                else:
                    self._blank[block % self.owners].append(block)

    def check(self) -> None:
        """Raise `AssertionError` if the pool's invariants do not hold (for tests)."""
        in_use = {block for block, refs in enumerate(self._refs) if refs > 0}
        blank = {block for owned in self._blank for block in owned}
        cached = {block for owned in self._cached for block in owned}
        assert len(blank) == self.num_blank, "a block is blank twice"
        assert len(blank | cached | in_use) == len(blank) + len(cached) + len(in_use), "a block is in two places"
        assert len(blank) + len(cached) + len(in_use) == self.num_blocks, "a block is lost"
        assert cached <= self._name_of.keys(), "a cached block cannot be found"
        assert not blank & self._name_of.keys(), "a blank block can be found"
        assert self._block_of == {name: block for block, name in self._name_of.items()}, "the index is not one to one"
        for owner in range(self.owners):
            owned = {*self._blank[owner], *self._cached[owner]}
            assert all(block % self.owners == owner for block in owned), "a block lies with another owner"
