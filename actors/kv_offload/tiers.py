"""The tiers behind a device's pages: host memory, then a shared tier.

    keep   ──→ host memory ───────────────────────→ given up when it is full
    share  ──→ (a thread) ──→ shared tier ──→ ...
    fetch  ←── host memory ←── not whole there: the rest from the shared tier, which then lies in host memory too

A block is kept and shared at once, so giving it up in host memory costs nothing, and a process that is killed has lost only
what still waited to be written. Kept is all a rank has; of what several ranks have, each shares a part.
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
    """Pieces of blocks of one model. `shared` may be absent; at most `queue_bytes` wait to be written to it."""

    def __init__(
        self, kv_format: KVFormat, host: HostTier, shared: SharedTier | None = None, queue_bytes: int = 256 << 20
    ) -> None:
        self.kv_format, self.host, self.shared = kv_format, host, shared
        self.hits: Counter[str] = Counter()
        """Pieces that were fetched, by the lowest tier that was needed (``host``, ``shared``), and those that were not had
        (``miss``)."""
        self._writer = None if shared is None else BackgroundWriter(shared, queue_bytes)

    @property
    def num_unwritten(self) -> int:
        """Pieces that the shared tier does not have: too many waited, or a write failed."""
        return 0 if self._writer is None else self._writer.num_turned_away + self._writer.num_failed

    def keep(self, block: BlockName, part: BlockPart, data: bytes) -> bool:
        """Put a part into host memory; False where all there is pinned. Raises `ValueError` for data of another size."""
        self._check(block, part, data)
        return self.host.store(block, part, data)

    def share(self, block: BlockName, part: BlockPart, data: bytes, place: int = 0) -> bool:
        """Have a part written to the shared tier; False where there is none, or too much waits. Never waits.

        `place`: the block's in its sequence. Raises `ValueError` for data of another size.
        """
        self._check(block, part, data)
        return self._writer is not None and self._writer.offer(block, part, data, place)

    def has(self, block: BlockName, wanted: BlockPart) -> bool:
        """Whether `fetch` would find it now. Reads names, not bytes: a damaged file is noticed later."""
        return covers(wanted, self._everything(block))

    def count(self, blocks: Sequence[BlockName], wanted: Iterable[BlockPart]) -> int:
        """How many of `blocks`, from the first on, are there with every one of the parts: the length of a prefix hit."""
        parts = list(wanted)
        for index, block in enumerate(blocks):
            if not all(self.has(block, part) for part in parts):
                return index
        return len(blocks)

    def fetch(self, block: BlockName, wanted: BlockPart, place: int = 0) -> bytes | None:
        """The bytes of a part, whatever parts it was written in; None: a miss. `place`: the block's in its sequence."""
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
        """Keep blocks that are about to be fetched, until `unpin`."""
        self.host.pin(blocks)
        if self.shared is not None:
            self.shared.pin(blocks)

    def unpin(self, blocks: Sequence[BlockName]) -> None:
        self.host.unpin(blocks)
        if self.shared is not None:
            self.shared.unpin(blocks)

    def flush(self, timeout_s: float) -> None:
        """Return when all that was shared has been written. Raises `TimeoutError`."""
        if self._writer is not None:
            self._writer.flush(timeout_s)

    def close(self, timeout_s: float = 30.0) -> None:
        """Write what waits, then end. Raises `TimeoutError`."""
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
