"""Hashes of the prefix cache: a KV block is identified by a SHA-256 chain over the token ids of its whole prefix.

    root = H(salt, class)      h0 = H(root, tokens[0:16])      h1 = H(h0, tokens[16:32])      ...

Equal hashes mean equal tokens from position 0 on, an equal salt, and an equal length class, which is that of sequences to which
the model applies the same rope (0 for nearly every model, see `RopeSpec.length_class`). The hash is cryptographic because a
tenant who could forge a collision would read another tenant's cache. It is computed over canonical bytes because the hashes of
different processes must agree.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

BlockHash = bytes


def root_hash(salt: str, length_class: int = 0) -> BlockHash:
    """Return the parent hash of a sequence's first block. Sequences with different salts or length classes share no blocks.

    `salt` comes from the request; `length_class` is equal for sequences with the same rope (`RopeSpec.length_class`).
    """
    prefix = b"shardwright/prefix/1\0" + struct.pack("<q", length_class)
    return hashlib.sha256(prefix + salt.encode("utf-8", "surrogatepass")).digest()


def block_hash(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    """Return the SHA-256 hash of the block that follows the block with hash `parent` and holds the token ids `tokens` (hashed
    as little-endian 64-bit integers)."""
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}q", *tokens)).digest()


class PrefixChain:
    """The hashes of a growing sequence's full blocks, each computed once."""

    def __init__(self, salt: str, block_size: int, length_class: int = 0) -> None:
        self.hashes: list[BlockHash] = []
        self._root = root_hash(salt, length_class)
        self._block_size = block_size

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the hashes of all full blocks of `tokens` that have none yet. `tokens` are all tokens of the sequence from its
        start, and must begin with those of earlier calls."""
        size = self._block_size
        for start in range(len(self.hashes) * size, len(tokens) - size + 1, size):
            parent = self.hashes[-1] if self.hashes else self._root
            self.hashes.append(block_hash(parent, tokens[start : start + size]))
