"""Names of what tiers hold: a block, and which logical part of it.

A block is the KV of `block_tokens` tokens of a sequence, named by the model that made it, the dtype of its values, and the
hash of its tokens and all before them (`actors.engine.kv.prefix`). A rank has only a part of it, and what part is said in terms
of the whole model, never of the rank: so a block that was written under one layout can be read under another::

    tp=2 wrote             layers 0-3, head 0    and    layers 0-3, head 1
    pp=2 reads             layers 0-1, heads 0-1   =    half of each of them
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace

from placement.model.spec import DTYPE_BYTES, DType, ModelSpec

BlockName = str
"""64 hexadecimal digits."""

_FORMAT = b"shardwright/tier/1\0"
_TEXT = re.compile(r"l(\d+)-(\d+)_h(\d+)-(\d+)_p(\d+)-(\d+)")


@dataclass(frozen=True)
class BlockPart:
    """Part of a block: layers and KV heads of the whole model, positions within the block. Its bytes are
    [layers, planes, heads, positions, values], contiguous."""

    layers: range
    kv_heads: range
    positions: range

    def __str__(self) -> str:
        """``l0-4_h0-1_p0-16``: the ends are not included."""
        ranges = (("l", self.layers), ("h", self.kv_heads), ("p", self.positions))
        return "_".join(f"{letter}{each.start}-{each.stop}" for letter, each in ranges)

    @classmethod
    def parse(cls, text: str) -> BlockPart | None:
        """The inverse of ``str()``; None for any other text."""
        found = _TEXT.fullmatch(text)
        if found is None:
            return None
        ends = [int(number) for number in found.groups()]
        return cls(range(*ends[:2]), range(*ends[2:4]), range(*ends[4:]))

    def overlap(self, other: BlockPart) -> BlockPart | None:
        """What both cover; None: nothing."""
        both = BlockPart(
            _overlap(self.layers, other.layers),
            _overlap(self.kv_heads, other.kv_heads),
            _overlap(self.positions, other.positions),
        )
        return both if both.size else None

    @property
    def size(self) -> int:
        """Positions of heads in layers."""
        return len(self.layers) * len(self.kv_heads) * len(self.positions)

    def within(self, outer: BlockPart) -> BlockPart:
        """The same in the numbering of `outer`, which covers it: every range begins where outer's begins."""
        return replace(
            self,
            layers=_shifted(self.layers, outer.layers.start),
            kv_heads=_shifted(self.kv_heads, outer.kv_heads.start),
            positions=_shifted(self.positions, outer.positions.start),
        )


@dataclass(frozen=True)
class KVFormat:
    """What the bytes of every part of a model are made of."""

    model_digest: str
    dtype: DType
    planes: int
    kv_dim: int
    block_tokens: int

    @classmethod
    def of(cls, spec: ModelSpec, model_digest: str, dtype: DType, block_tokens: int) -> KVFormat:
        return cls(model_digest, dtype, spec.kv_planes, spec.kv_dim, block_tokens)

    def num_bytes(self, part: BlockPart) -> int:
        """Bytes of a part."""
        return part.size * self.planes * self.kv_dim * DTYPE_BYTES[self.dtype]

    def name(self, block_hash: bytes) -> BlockName:
        """The name of the block with this hash: another one under every model, dtype and format of its values."""
        kv_format = f"{self.model_digest}/{self.dtype}/{self.planes}x{self.kv_dim}/{self.block_tokens}/".encode()
        return hashlib.sha256(_FORMAT + kv_format + block_hash).hexdigest()


def _overlap(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def _shifted(each: range, by: int) -> range:
    return range(each.start - by, each.stop - by)
