"""Rows in pieces: on a CPU a row of the vocabulary fits the cache and thirty-two do not, which makes each pass 3x slower."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

_CACHED_COLUMNS = 1 << 16
"""fp32 columns worked on at a time: 256 KiB, and as much again for intermediate values, in a 1 MiB cache."""


def blocks(rows: Tensor) -> Iterator[slice]:
    """Slices of the rows of `rows` [rows, columns], to be worked on one after the other. All at once on a GPU."""
    total, columns = rows.shape
    size = max(1, _CACHED_COLUMNS // columns) if rows.device.type == "cpu" else total
    for start in range(0, total, size):
        yield slice(start, start + size)
