"""Slices of checkpoint tensors that form a rank's parameters: column-parallel, row-parallel and replicated.

`placement.ownership.shards` determines which kind of slice each parameter uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

Segment = tuple[str, int, range]
"""Name of a source tensor, its number of rows, and the range of rows to take."""


@dataclass(frozen=True)
class WeightSlice:
    """One slice of a checkpoint tensor and its position in a rank's parameter.

    ``target.narrow(dim, at, len(take))`` receives the indices `take` of dimension `dim` of the source; `take` may have a step.
    `source` is the Hugging Face name of the tensor, `source_shape` its complete shape.

    For tensors that stack one matrix per expert, the slice is one of ``source[source_slot]``, and the target is
    ``target[slot]``, or ``target[slot].T`` if `transposed`.
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
        """Shape of the slice, oriented as in the source, without the dimension of experts."""
        whole = self.source_shape if self.source_slot is None else self.source_shape[1:]
        return (*whole[: self.dim], len(self.take), *whole[self.dim + 1 :])


@dataclass(frozen=True)
class Parameter:
    """A rank's parameter: its local shape and the slices that fill it. Rows that no slice covers are zero padding."""

    name: str
    shape: tuple[int, ...]
    slices: tuple[WeightSlice, ...]
    fp32: bool = False
    """Whether the parameter is stored in float32, independent of the model's dtype."""


def fused(source: str, segments: Sequence[Segment]) -> list[Segment]:
    """Returns `segments` as segments of one tensor `source` that stacks them, for a checkpoint with fused projections; each
    segment is sliced separately::

        qkv_proj   [ q0 q1 q2 q3 | k0 k1 | v0 v1 ]      tp_rank 1 of 2 takes [q2 q3], [k1] and [v1]
    """
    starts = accumulate((rows for _, rows, _ in segments), initial=0)
    total = sum(rows for _, rows, _ in segments)
    return [
        (source, total, range(start + take.start, start + take.stop))
        for (_, _, take), start in zip(segments, starts, strict=False)
    ]


def rows(name: str, inputs: int | None, *segments: Segment) -> Parameter:
    """Returns a column-parallel parameter called `name`: stacked slices of output rows of one or several tensors.

    Each of `segments` is (tensor name, its number of rows, rows to take); rows past the tensor's end become zero padding. The
    tensors are matrices with `inputs` columns, or biases if `inputs` is None.
    """
    tail = () if inputs is None else (inputs,)
    starts = accumulate((len(take) for _, _, take in segments), initial=0)
    slices = tuple(
        WeightSlice(source, (rows, *tail), 0, range(take.start, min(take.stop, rows)), at)
        for (source, rows, take), at in zip(segments, starts, strict=False)
        if take.start < rows
    )
    return Parameter(name, (sum(len(take) for _, _, take in segments), *tail), slices)


def inputs(name: str, source: str, rows: int, inputs: int, take: range) -> Parameter:
    """Returns a row-parallel parameter called `name`: the input columns `take` of the checkpoint tensor `source`, ``[rows,
    inputs]``.

    Its output is a partial sum. A bias is added once, after the sum over the ranks.
    """
    return Parameter(name, (rows, len(take)), (WeightSlice(source, (rows, inputs), 1, take, 0),))


def of_heads(heads: range, dim: int) -> range:
    """Returns the rows (or columns) of a projection that belong to a range of heads with `dim` dimensions each."""
    return range(heads.start * dim, heads.stop * dim)


def whole(name: str, source: str, size: int) -> Parameter:
    """Returns a replicated parameter called `name`: the vector `source` of the checkpoint, ``[size]``, which every rank of the
    group holds completely."""
    return Parameter(name, (size,), (WeightSlice(source, (size,), 0, range(size), 0),))
