"""Names of the KV blocks and block parts that the offload tiers store.

A block is the KV of `block_tokens` tokens of a sequence. Its name is derived from the model, the dtype of the values, and the
hash of its tokens and of all tokens before them (`actors.engine.kv.prefix`). A rank holds only a part of a block. The part is
described by layers and heads of the whole model, not of the rank, so a block that was written under one layout can be read
under another::

    tp=2 has written       layers 0-3, head 0    and    layers 0-3, head 1
    pp=2 reads             layers 0-1, heads 0-1   =    half of each of the two
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace

from placement.model.spec import DTYPE_BYTES, DType, ModelSpec

BlockName = str
"""The name of a block: 64 hexadecimal digits."""

_FORMAT = b"shardwright/tier/1\0"
_TEXT = re.compile(r"l(\d+)-(\d+)_h(\d+)-(\d+)_p(\d+)-(\d+)")


@dataclass(frozen=True)
class BlockPart:
    """A part of a block: layers and KV heads of the whole model, and positions within the block.

    Its bytes are [layers, planes, heads, positions, values], contiguous.
    """

    layers: range
    kv_heads: range
    positions: range

    def __str__(self) -> str:
        """Returns the part as text, as in ``l0-4_h0-1_p0-16``. The ends are exclusive."""
        ranges = (("l", self.layers), ("h", self.kv_heads), ("p", self.positions))
        return "_".join(f"{letter}{each.start}-{each.stop}" for letter, each in ranges)

    @classmethod
    def parse(cls, text: str) -> BlockPart | None:
        """Returns the part that `text` names: the inverse of ``str()``. Returns None for any other text."""
        found = _TEXT.fullmatch(text)
        if found is None:
            return None
        ends = [int(number) for number in found.groups()]
        return cls(range(*ends[:2]), range(*ends[2:4]), range(*ends[4:]))

    def overlap(self, other: BlockPart) -> BlockPart | None:
        """Returns the part that both cover, or None if they are disjoint."""
        both = BlockPart(
            _overlap(self.layers, other.layers),
            _overlap(self.kv_heads, other.kv_heads),
            _overlap(self.positions, other.positions),
        )
        return both if both.size else None

    @property
    def size(self) -> int:
        """Number of (layer, head, position) triples."""
        return len(self.layers) * len(self.kv_heads) * len(self.positions)

    def within(self, outer: BlockPart) -> BlockPart:
        """Returns the same part with ranges that count from the starts of those of `outer`, a part that covers it."""
        return replace(
            self,
            layers=_shifted(self.layers, outer.layers.start),
            kv_heads=_shifted(self.kv_heads, outer.kv_heads.start),
            positions=_shifted(self.positions, outer.positions.start),
        )


@dataclass(frozen=True)
class KVFormat:
    """The format of the KV values of a model, which all its block parts share."""

    model_digest: str
    dtype: DType
    planes: int
    kv_dim: int
    block_tokens: int

    @classmethod
    def of(cls, spec: ModelSpec, model_digest: str, dtype: DType, block_tokens: int) -> KVFormat:
        """Returns the format of a model's KV in `dtype`, in blocks of `block_tokens` tokens. `model_digest` identifies the
        model's weights (`placement.model.digest`)."""
        return cls(model_digest, dtype, spec.kv_planes, spec.kv_dim, block_tokens)

    def num_bytes(self, part: BlockPart) -> int:
        """Returns the size in bytes of the values of a part."""
        return part.size * self.planes * self.kv_dim * DTYPE_BYTES[self.dtype]

    def name(self, block_hash: bytes) -> BlockName:
        """Returns the name of the block with the prefix hash `block_hash` (`actors.engine.kv.prefix`). It differs between
        models, dtypes and value formats."""
        kv_format = f"{self.model_digest}/{self.dtype}/{self.planes}x{self.kv_dim}/{self.block_tokens}/".encode()
        return hashlib.sha256(_FORMAT + kv_format + block_hash).hexdigest()


def _overlap(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def _shifted(each: range, by: int) -> range:
    return range(each.start - by, each.stop - by)
