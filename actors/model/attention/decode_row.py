"""One decode row as kernels take it: a query, and the blocks with the keys it may see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from actors.model.step.batch import Batch


@dataclass(frozen=True)
class DecodeRow:
    """One query, the token `token` of the step, and the blocks that hold its keys."""

    token: int
    blocks: list[int]
    first: int
    """First visible token, counted from the start of `blocks`."""
    stop: int
    """One past the last visible token, counted from the start of `blocks`."""


def decode_row(token: int, table: list[int], first: int, stop: int, block_size: int) -> DecodeRow:
    """Return the decode row of the query `token` (its index in the step), which sees the tokens ``[first, stop)`` of a sequence
    with the block table `table` and blocks of `block_size` tokens. Blocks without visible tokens are dropped."""
    skipped = first // block_size
    return DecodeRow(token, table[skipped : -(-stop // block_size)], first - skipped * block_size, stop - skipped * block_size)


def decode_rows(batch: Batch, block_size: int, window: int | None) -> Iterator[DecodeRow]:
    """Yield a row for each sequence of `batch` with one query token, under the sliding `window` (tokens; None: all), with
    blocks of `block_size` tokens."""
    token = 0
    for queries, context, table in zip(batch.query_lens, batch.context_lens, batch.block_tables, strict=True):
        if queries == 1:
            stop = context + 1
            first = 0 if window is None else max(0, stop - window)
            yield decode_row(token, table, first, stop, block_size)
        token += queries
