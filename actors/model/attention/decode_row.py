"""One decode row as kernels take it: a query, and the blocks with the keys it may see."""

from __future__ import annotations

from dataclasses import dataclass


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
