"""A tier that outlives the process and that several replicas use: the interface.

`actors.kv_offload.directory` is a directory of a local or network file system; a store over the network can take its place.
Everything may be gone at any time (another replica's eviction), so nothing here promises: what cannot be had is a miss.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from actors.kv_offload.block_part import BlockName, BlockPart


class SharedTier(Protocol):
    """Pieces of blocks by name. Safe for several threads and processes at once."""

    def parts(self, block: BlockName) -> list[BlockPart]:
        """What is there of a block."""
        ...

    def load(self, block: BlockName, part: BlockPart, place: int = 0) -> bytes | None:
        """The bytes of a part as they were stored, which counts as use of it; None: a miss.

        `place`: the block's in its sequence. Of what is used together later places are given up first, here and in `store`:
        without the blocks before it a block is of no use.
        """
        ...

    def store(self, block: BlockName, part: BlockPart, data: bytes, place: int = 0) -> bool:
        """Keep a part; False where that could not be done. It is there whole or not at all, whenever the process ends."""
        ...

    def pin(self, blocks: Iterable[BlockName]) -> None:
        """Keep this process from giving up these blocks, until as many `unpin`."""
        ...

    def unpin(self, blocks: Iterable[BlockName]) -> None: ...

    def close(self) -> None:
        """End the use of it; what it holds stays."""
        ...
