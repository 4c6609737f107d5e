"""The KV offload tiers behind the device's pages: host (CPU) memory, then a shared tier (disk).

    keep   ──→ host memory ───────────────────────→ evicted when it is full
    share  ──→ (a thread) ──→ shared tier ──→ ...
    fetch  ←── host memory ←── if incomplete, the rest from the shared tier; the result is then kept in host memory too

A block is kept and shared at the same time, so evicting it from host memory costs no write, and a process that is killed loses
only the parts that were still queued. A rank keeps all the parts that it holds; of parts that several ranks hold, each rank
shares some.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from actors.kv_offload.assemble import assemble, covers
from actors.kv_offload.background import BackgroundWriter
from actors.kv_offload.block_part import BlockName, BlockPart, KVFormat
from actors.kv_offload.host import HostTier
from actors.kv_offload.shared import SharedTier


class Tiers:
    """The tiers for the KV blocks of one model. `shared` is optional; at most `queue_bytes` are queued to be written to it."""

    def __init__(
        self, kv_format: KVFormat, host: HostTier, shared: SharedTier | None = None, queue_bytes: int = 256 << 20
    ) -> None:
        self.kv_format, self.host, self.shared = kv_format, host, shared
        self.hits: Counter[str] = Counter()
        """Number of fetched parts by the lowest tier that was needed (``host``, ``shared``), and of misses (``miss``)."""
        self._writer = None if shared is None else BackgroundWriter(shared, queue_bytes)

    @property
    def num_unwritten(self) -> int:
        """Number of parts that did not reach the shared tier, because the queue was full or the write failed."""
        return 0 if self._writer is None else self._writer.num_turned_away + self._writer.num_failed

    def keep(self, block: BlockName, part: BlockPart, data: bytes) -> bool:
        """Store the bytes `data` of a block's part in host memory. Returns false if there is no room. Raises `ValueError` if
        `data` does not have the size of the part."""
        self._check(block, part, data)
        return self.host.store(block, part, data)

    def share(self, block: BlockName, part: BlockPart, data: bytes, place: int = 0) -> bool:
        """Queue the bytes `data` of a block's part to be written to the shared tier. Returns false if there is none, or the
        queue is full. Never blocks.

        `place` is the index of the block in its sequence. Raises `ValueError` if `data` does not have the size of the part.
        """
        self._check(block, part, data)
        return self._writer is not None and self._writer.offer(block, part, data, place)

    def has(self, block: BlockName, wanted: BlockPart) -> bool:
        """Returns whether the tiers hold everything that the part `wanted` of a block needs. Checks names only: `fetch` detects
        damaged files."""
        return covers(wanted, self._everything(block))

    def count(self, blocks: Sequence[BlockName], wanted: Iterable[BlockPart]) -> int:
        """Returns the length of the prefix hit: the number of `blocks`, from the first on, of which the tiers hold all `wanted`
        parts."""
        parts = list(wanted)
        for index, block in enumerate(blocks):
            if not all(self.has(block, part) for part in parts):
                return index
        return len(blocks)

    def fetch(self, block: BlockName, wanted: BlockPart, place: int = 0) -> bytes | None:
        """Returns the bytes of the part `wanted` of a block, assembled from whatever parts were written, or None for a miss.

        What the shared tier contributed is then kept in host memory too. `place` is the index of the block in its sequence.
        """
        data = assemble(self.kv_format, wanted, self.host.parts(block), lambda part: self.host.load(block, part))
        if data is not None:
            self.hits["host"] += 1
            return data
        data = assemble(self.kv_format, wanted, self._everything(block), lambda part: self._load(block, part, place))
        self.hits["shared" if data is not None else "miss"] += 1
        if data is not None:
            self.host.store(block, wanted, data)
        return data

    def pin(self, blocks: Sequence[BlockName]) -> None:
        """Protect blocks that are about to be fetched from eviction, in both tiers, until `unpin`."""
        self.host.pin(blocks)
        if self.shared is not None:
            self.shared.pin(blocks)

    def unpin(self, blocks: Sequence[BlockName]) -> None:
        """Undo one `pin` of each block. `AssertionError` if a block is unpinned more often than it was pinned."""
        self.host.unpin(blocks)
        if self.shared is not None:
            self.shared.unpin(blocks)

    def flush(self, timeout_s: float) -> None:
        """Wait until all parts queued for the shared tier have been written or have failed. Raises `TimeoutError` after
        `timeout_s` seconds."""
        if self._writer is not None:
            self._writer.flush(timeout_s)

    def close(self, timeout_s: float = 30.0) -> None:
        """Write all queued parts, then close the shared tier; does nothing without one. Raises `TimeoutError`, and leaves the
        tier open, if the writes take longer than `timeout_s` seconds."""
        if self._writer is not None and self.shared is not None:
            self._writer.close(timeout_s)
            self.shared.close()

    def _check(self, block: BlockName, part: BlockPart, data: bytes) -> None:
        if len(data) != self.kv_format.num_bytes(part):
            raise ValueError(
                f"part {part} of block {block} has {len(data)} bytes, but should have {self.kv_format.num_bytes(part)}"
            )

    def _everything(self, block: BlockName) -> list[BlockPart]:
        shared = [] if self.shared is None else self.shared.parts(block)
        return list({*self.host.parts(block), *shared})

    def _load(self, block: BlockName, part: BlockPart, place: int) -> bytes | None:
        data = self.host.load(block, part)
        return self.shared.load(block, part, place) if data is None and self.shared is not None else data
