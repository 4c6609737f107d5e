"""The KV blocks of one engine: who holds which, and which can be found again.

          allocate                       free (last reference)
    blank ────────→ in use (refs > 0) ──────────────────────→ cached, if registered  (least recent first)
      ↑                  ↑     │                                │  │
      └──────────────────┼─────┘ free, never registered         │  │ allocate, once no block is blank: evict
                         └──────── acquire (a hit) ─────────────┘  └──→ in use under a new owner

Every block is in exactly one of the three places, so ``blank + cached + in use == num_blocks`` always.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from actors.engine.prefix import BlockHash


class BlockPool:
    """`num_blocks` blocks with reference counts, and an index of those whose contents have a name."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: dict[int, None] = {}
        """Unreferenced but findable, the first to be evicted first (a dict keeps insertion order)."""
        self._refs = [0] * num_blocks
        self._name_of: dict[int, BlockHash] = {}
        self._block_of: dict[BlockHash, int] = {}

    @property
    def num_blank(self) -> int:
        return len(self._blank)

    @property
    def num_cached(self) -> int:
        """Blocks nobody holds whose contents can still be hit."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._blank) + len(self._cached)

    def available_beside(self, hits: Iterable[int]) -> int:
        """Blocks that `allocate` can hand out once `hits` are acquired."""
        return self.num_available - sum(block in self._cached for block in hits)

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
                del self._cached[block]
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each; the caller has seen that so many are available."""
        assert count <= self.num_available, f"{count} blocks asked for, {self.num_available} available"
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        block = self._blank.pop() if self._blank else self._evict()
        self._refs[block] = 1
        return block

    def _evict(self) -> int:
        block = next(iter(self._cached))
        del self._cached[block]
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
                    self._cached[block] = None
                else:
                    self._blank.append(block)

    def check(self) -> None:
        """Assert the pool's invariants (for tests)."""
        in_use = {block for block, refs in enumerate(self._refs) if refs > 0}
        blank, cached = set(self._blank), set(self._cached)
        assert len(blank) == len(self._blank), "a block is blank twice"
        assert len(blank | cached | in_use) == len(blank) + len(cached) + len(in_use), "a block is in two places"
        assert len(blank) + len(cached) + len(in_use) == self.num_blocks, "a block is lost"
        assert cached <= self._name_of.keys(), "a cached block cannot be found"
        assert not blank & self._name_of.keys(), "a blank block can be found"
        assert self._block_of == {name: block for block, name in self._name_of.items()}, "the index is not one to one"
