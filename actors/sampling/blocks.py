"""Blocks of logit rows: on a CPU one vocabulary row fits the cache and thirty-two do not, which makes each pass 3x slower."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

_CACHED_COLUMNS = 1 << 16
"""fp32 columns processed at a time: 256 KiB, and as much again for intermediate values, in a 1 MiB cache."""


def blocks(rows: Tensor) -> Iterator[slice]:
    """Yield slices that together cover the rows of `rows` [rows, columns], to be processed one after the other: on a CPU few
    enough rows to stay in its cache, on a GPU one slice of all."""
    total, columns = rows.shape
    size = max(1, _CACHED_COLUMNS // columns) if rows.device.type == "cpu" else total
    for start in range(0, total, size):
        yield slice(start, start + size)
