"""Page-level KV transfer: translates a copy of the hand-off map into byte ranges of source and destination pages.

Pages are head-major: a page holds one head of one plane (K, V or the latent) of one layer for `page_tokens` positions, so the
same byte ranges apply to every layer, plane and head of a copy. Pages of 16 tokens into pages of 32, 8 bytes per token::

    positions          0-15              16-31             32-39
    source page        7, 0 + 128        3, 0 + 128        9, 0 + 64        (page, offset + length in bytes)
    destination page   4, 0 + 128        4, 128 + 128      6, 0 + 64
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from placement.ownership.context import Ownership
from placement.ownership.handoff import Copy


@dataclass(frozen=True)
class PageRange:
    """The bytes ``[offset, offset + length)`` of a page of one head in one plane."""

    page: int
    offset: int
    length: int


@dataclass(frozen=True)
class PageTable:
    """The pages of a sequence on a rank.

    `pages` has the page of every block of the sequence, including blocks of other owners, in the order of step plans: block j
    is a page of owner ``j % owners``.
    """

    ownership: Ownership
    pages: Sequence[int]

    def slot(self, position: int, own_pages: list[int]) -> int:
        """Returns the slot of a position in the rank's cache: ``page * block_size + position % block_size``.

        `own_pages` has this rank's pages of the sequence, in order (`Ownership.blocks` of `pages`). Raises `ValueError` if the
        position is beyond the last block, and `AssertionError` if another rank owns it.
        """
        block = position // self.ownership.block_size
        if block >= len(self.pages):
            raise ValueError(
                f"position {position} is in block {block} of {self.ownership.block_size} tokens, but the sequence has "
                f"{len(self.pages)} blocks: reserve as many as the copy reaches to"
            )
        slot = self.ownership.slot(position, own_pages)
        assert slot >= 0, f"position {position} is not kept by owner {self.ownership.owner} of {self.ownership.owners}"
        return slot


def page_ranges(
    copy: Copy, source: PageTable, destination: PageTable, token_bytes: int
) -> Iterator[tuple[PageRange, PageRange]]:
    """Yields the (source, destination) byte ranges of a copy, by position; none crosses a page boundary on either side.

    The same ranges apply to every layer, plane (K, V or latent) and head of the copy. `source` and `destination` are the
    sequence's pages on the two ranks; `token_bytes` is the number of bytes of one position of one head in one plane. Raises
    `ValueError` if a side has too few blocks, and `AssertionError` if a rank does not own a position of the copy.
    """
    sides = [(table, table.ownership.blocks(list(table.pages))) for table in (source, destination)]
    for span in copy.positions.spans():
        start = span.start
        while start < span.stop:
            stop = min(span.stop, *(_page_end(start, table.ownership.block_size) for table, _ in sides))
            here, there = (_range(table, own, start, stop, token_bytes) for table, own in sides)
            yield here, there
            start = stop


def _page_end(position: int, page_tokens: int) -> int:
    return (position // page_tokens + 1) * page_tokens


def _range(table: PageTable, own_pages: list[int], start: int, stop: int, token_bytes: int) -> PageRange:
    page, offset = divmod(table.slot(start, own_pages), table.ownership.block_size)
    return PageRange(page, offset * token_bytes, (stop - start) * token_bytes)
