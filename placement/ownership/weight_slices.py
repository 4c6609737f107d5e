"""The slices of checkpoint tensors that a rank's parameters are made of, and the ways of cutting them.

Which cut a parameter gets is said in `placement.ownership.shards`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

Segment = tuple[str, int, range]
"""Name of a source, its number of rows, the rows taken."""


@dataclass(frozen=True)
class WeightSlice:
    """One slice of one checkpoint tensor and where it lands in a rank's parameter.

    ``target.narrow(dim, at, len(take))`` receives ``source.narrow(dim, take.start, len(take))``, or every so many of these
    where `take` has a step. `source` is the Hugging Face name of the tensor, `source_shape` its whole shape.

    Where tensors hold one matrix an expert, all of this is said of the matrix ``source[source_slot]`` and of ``target[slot]``;
    where the source's is `transposed`, of ``target[slot].T``.
    """

    source: str
    source_shape: tuple[int, ...]
    dim: int
    take: range
    at: int
    source_slot: int | None = None
    slot: int | None = None
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        whole = self.source_shape if self.source_slot is None else self.source_shape[1:]
        return (*whole[: self.dim], len(self.take), *whole[self.dim + 1 :])


@dataclass(frozen=True)
class Parameter:
    """A rank's parameter: its local shape and the slices that fill it. Rows no slice covers are padding, and zero."""

    name: str
    shape: tuple[int, ...]
    slices: tuple[WeightSlice, ...]
    fp32: bool = False
    """Kept in float32 whatever the model computes in."""


def fused(source: str, segments: Sequence[Segment]) -> list[Segment]:
    """The same segments where a checkpoint has them stacked in one tensor; each is sliced by itself::

    qkv_proj   [ q0 q1 q2 q3 | k0 k1 | v0 v1 ]      tp_rank 1 of 2 takes [q2 q3], [k1] and [v1]
    """
    starts = accumulate((rows for _, rows, _ in segments), initial=0)
    total = sum(rows for _, rows, _ in segments)
    return [
        (source, total, range(start + take.start, start + take.stop))
        for (_, _, take), start in zip(segments, starts, strict=False)
    ]


def rows(name: str, inputs: int | None, *segments: Segment) -> Parameter:
    """Slices of output rows (of a matrix with `inputs` columns, or of a bias), stacked: column parallel."""
    tail = () if inputs is None else (inputs,)
    starts = accumulate((len(take) for _, _, take in segments), initial=0)
    slices = tuple(
        WeightSlice(source, (rows, *tail), 0, range(take.start, min(take.stop, rows)), at)
        for (source, rows, take), at in zip(segments, starts, strict=False)
        if take.start < rows
    )
    return Parameter(name, (sum(len(take) for _, _, take in segments), *tail), slices)


def inputs(name: str, source: str, rows: int, inputs: int, take: range) -> Parameter:
    """A slice of input columns: row parallel. Its output is a partial sum, its bias is added once, after the sum."""
    return Parameter(name, (rows, len(take)), (WeightSlice(source, (rows, inputs), 1, take, 0),))


def of_heads(heads: range, dim: int) -> range:
    """Rows, or columns, of heads with `dim` dimensions each."""
    return range(heads.start * dim, heads.stop * dim)


def whole(name: str, source: str, size: int) -> Parameter:
    """A vector every rank of the group holds."""
    return Parameter(name, (size,), (WeightSlice(source, (size,), 0, range(size), 0),))
