"""The interface of a shared KV tier, which outlives the process and is used by several replicas.

`actors.kv_offload.directory` implements it in a directory of a local or network file system; a network store can take its
place. Any part may disappear at any time, for example by another replica's eviction, so every load may be a miss.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from actors.kv_offload.block_part import BlockName, BlockPart


class SharedTier(Protocol):
    """A store of block parts by name. Safe for concurrent use by threads and processes."""

    def parts(self, block: BlockName) -> list[BlockPart]:
        """Returns the stored parts of a block; none if it is unknown or cannot be read. Does not count as a use."""
        ...

    def load(self, block: BlockName, part: BlockPart, place: int = 0) -> bytes | None:
        """Returns the bytes of exactly this part of a block as they were stored, or None for a miss. Counts as a use of the
        part.

        `place` is the index of the block in its sequence. Among parts used together, here and in `store`, those at later places
        are evicted first, because a block is useless without the blocks before it.
        """
        ...

    def store(self, block: BlockName, part: BlockPart, data: bytes, place: int = 0) -> bool:
        """Store the bytes `data` of a part. Returns whether it is stored now, by this call or an earlier one. It is stored
        whole or not at all, even if the process is killed. `place` is explained in `load`."""
        ...

    def pin(self, blocks: Iterable[BlockName]) -> None:
        """Protect blocks from eviction by this process, until each pin is undone by an `unpin`."""
        ...

    def unpin(self, blocks: Iterable[BlockName]) -> None:
        """Undo one `pin` of each block; a block that is not pinned is ignored."""
        ...

    def close(self) -> None:
        """Close the tier; its contents remain."""
        ...
