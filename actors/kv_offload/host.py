"""The tier in host memory: parts of blocks by name, the least recently used given up first, bounded in bytes."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from threading import Lock

from actors.kv_offload.block_part import BlockName, BlockPart


class HostTier:
    """At most `limit_bytes` of parts. Safe for several threads. A pinned block stays whatever comes."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self.num_evicted = 0
        self._held: OrderedDict[BlockName, dict[BlockPart, bytes]] = OrderedDict()
        """Least recently used first."""
        self._pins: Counter[BlockName] = Counter()
        self._lock = Lock()

    def parts(self, block: BlockName) -> list[BlockPart]:
        """What is here of a block. Does not count as use."""
        with self._lock:
            return list(self._held.get(block, ()))

    def load(self, block: BlockName, part: BlockPart) -> bytes | None:
        """The bytes of a part, which counts as use of its block; None where it is not here."""
        with self._lock:
            found = self._held.get(block, {}).get(part)
            if found is not None:
                self._held.move_to_end(block)
            return found

    def store(self, block: BlockName, part: BlockPart, data: bytes) -> bool:
        """Keep a part, giving up blocks used longer ago; False where even that leaves no room (all else is pinned)."""
        with self._lock:
            before = len(self._held.get(block, {}).get(part, b""))
            if not self._make_room(block, len(data) - before):
                return False
            self._held.setdefault(block, {})[part] = data
            self._held.move_to_end(block)
            self.num_bytes += len(data) - before
            return True

    def pin(self, blocks: Iterable[BlockName]) -> None:
        """Keep these blocks until as many `unpin`; a block that is not here yet is pinned once it comes."""
        with self._lock:
            self._pins.update(blocks)

    def unpin(self, blocks: Iterable[BlockName]) -> None:
        with self._lock:
            for block in blocks:
                assert self._pins[block] > 0, f"block {block} is unpinned more often than it was pinned"
                self._pins[block] -= 1
                if self._pins[block] == 0:
                    del self._pins[block]

    def _make_room(self, block: BlockName, more: int) -> bool:
        """Give up blocks other than `block` until `more` bytes fit; none if that cannot be reached."""
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
