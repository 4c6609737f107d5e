"""The KV tier in host memory: block parts by name, with a size limit and least-recently-used (LRU) eviction."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from threading import Lock

from actors.kv_offload.block_part import BlockName, BlockPart


class HostTier:
    """Stores at most `limit_bytes` of block parts. A pinned block is never evicted. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self.num_evicted = 0
        self._held: OrderedDict[BlockName, dict[BlockPart, bytes]] = OrderedDict()
        """The stored parts by block, least recently used block first."""
        self._pins: Counter[BlockName] = Counter()
        self._lock = Lock()

    def parts(self, block: BlockName) -> list[BlockPart]:
        """Returns the stored parts of a block. Does not count as a use of it."""
        with self._lock:
            return list(self._held.get(block, ()))

    def load(self, block: BlockName, part: BlockPart) -> bytes | None:
        """Returns the bytes of exactly this part of a block, or None if it is not stored. Counts as a use of its block."""
        with self._lock:
            found = self._held.get(block, {}).get(part)
            if found is not None:
                self._held.move_to_end(block)
            return found

    def store(self, block: BlockName, part: BlockPart, data: bytes) -> bool:
        """Store the bytes of a part, or replace them, evicting less recently used blocks if needed. Returns false, and changes
        nothing, if the part does not fit because it is too large or too much is pinned."""
        with self._lock:
            before = len(self._held.get(block, {}).get(part, b""))
            if not self._make_room(block, len(data) - before):
                return False
            self._held.setdefault(block, {})[part] = data
            self._held.move_to_end(block)
            self.num_bytes += len(data) - before
            return True

    def pin(self, blocks: Iterable[BlockName]) -> None:
        """Protect blocks from eviction until each pin is undone by an `unpin`. A block can be pinned before it is stored."""
        with self._lock:
            self._pins.update(blocks)

    def unpin(self, blocks: Iterable[BlockName]) -> None:
        """Undo one `pin` of each block. `AssertionError` if a block is unpinned more often than it was pinned."""
        with self._lock:
            for block in blocks:
                assert self._pins[block] > 0, f"block {block} is unpinned more often than it was pinned"
                self._pins[block] -= 1
                if self._pins[block] == 0:
                    del self._pins[block]

    def _make_room(self, block: BlockName, more: int) -> bool:
        """Evict blocks other than `block` until `more` bytes fit. Evicts nothing and returns false if they cannot fit."""
        excess = self.num_bytes + more - self.limit_bytes
        going: list[BlockName] = []
        for candidate, parts in self._held.items():
            if excess <= 0:
                break
            if candidate != block and candidate not in self._pins:
                going.append(candidate)
                excess -= sum(map(len, parts.values()))
        if excess > 0:
            return False
        for gone in going:
            self.num_bytes -= sum(map(len, self._held.pop(gone).values()))
        self.num_evicted += len(going)
        return True
