"""The KV blocks of one DP rank of an engine: who holds which, and which can be found again.

          allocate                       free (last reference)
    blank ────────→ in use (refs > 0) ──────────────────────→ cached, if registered  (least recent first)
      ↑                  ↑     │                                │  │
      └──────────────────┼─────┘ free, never registered         │  │ allocate, once no block is blank: evict
                         └──────── acquire (a hit) ─────────────┘  └──→ in use under a new owner

Every block is in exactly one of the three places, so ``blank + cached + in use == num_blocks`` always.

With context parallelism each of `owners` ranks holds pages of its own, and block j of a sequence must lie with owner
``j % owners``. Blocks are numbered through all owners; the rank knows one by its index in its own pages::

    owners=2    block     0  1  2  3  4  5           a sequence of three blocks: [4, 1, 0]
                owner     0  1  0  1  0  1   = block % owners
                page      0  0  1  1  2  2   = block // owners
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from actors.engine.kv.prefix import BlockHash


class BlockPool:
    """`blocks_each` blocks of each owner with reference counts, and an index of those whose contents have a name."""

    def __init__(self, blocks_each: int, owners: int = 1) -> None:
        self.num_blocks = blocks_each * owners
        """Blocks of all owners together."""
        self.owners = owners
        self._blank = [list(range(self.num_blocks - owners + owner, -1, -owners)) for owner in range(owners)]
        self._cached: list[dict[int, None]] = [{} for _ in range(owners)]
        """By owner: unreferenced but findable, the first to be evicted first (a dict keeps insertion order)."""
        self._refs = [0] * self.num_blocks
        self._name_of: dict[int, BlockHash] = {}
        self._block_of: dict[BlockHash, int] = {}

    @property
    def num_blank(self) -> int:
        return sum(map(len, self._blank))

    @property
    def num_cached(self) -> int:
        """Blocks nobody holds whose contents can still be hit."""
        return sum(map(len, self._cached))

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out, all owners together."""
        return self.num_blank + self.num_cached

    @property
    def num_held(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - self.num_available

    def count_held(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` sequences hold."""
        return sum(self._refs[block] > 0 for block in blocks)

    def has_room(self, places: range, hits: Iterable[int] = (), growing: Iterable[int] = ()) -> bool:
        """Whether every owner has the blocks for `places` (indices in a sequence) once `hits` are acquired.

        `growing`: places of other sequences that must still find a block afterwards.
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
        """The blocks of the longest known prefix of the chain `hashes`. Takes no reference."""
        hits = []
        for name in hashes:
            block = self._block_of.get(name)
            if block is None:
                break
            hits.append(block)
        return hits

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more reference to each of `blocks`, which came from `lookup`."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block % self.owners][block]
            self._refs[block] += 1

    def allocate(self, places: range) -> list[int]:
        """A block for each of `places` of a sequence, with one reference each; the caller has seen that there is room."""
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
        """Make a full, computed block findable. A duplicate of a known one stays unnamed and goes back blank."""
        assert self._refs[block] > 0, f"block {block} is registered but nobody holds it"
        if name not in self._block_of and block not in self._name_of:
            self._block_of[name] = block
            self._name_of[block] = name

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block of a sequence, given in sequence order.

        Last block first: it is evicted first, and what stays is the front, without which no later block can be hit.
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
        """Assert the pool's invariants (for tests)."""
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
