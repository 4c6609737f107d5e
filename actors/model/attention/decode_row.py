"""One decode row as a kernel call sees it: a query, and the blocks that hold the keys it may see."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeRow:
    """One query, the token `token` of the step, and the blocks its keys are in."""

    token: int
    blocks: list[int]
    first: int
    """First visible token, counted from the start of `blocks`."""
    stop: int
    """One past the last visible token, counted likewise."""


def decode_row(token: int, table: list[int], first: int, stop: int, block_size: int) -> DecodeRow:
    """A row that sees the tokens ``[first, stop)`` of those that lie end to end in the blocks of `table`."""
    skipped = first // block_size
    return DecodeRow(token, table[skipped : -(-stop // block_size)], first - skipped * block_size, stop - skipped * block_size)
