"""Text in aligned columns, the table format of all reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def columns(rows: Sequence[Sequence[str]], right: set[int]) -> Iterator[str]:
    """Yields each of `rows`, the cells of a table, as a line of text in aligned columns, indented by two. The columns whose
    indices are in `right` are aligned to the right. Raises `ValueError` if the rows have different lengths."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(wide) if at in right else cell.ljust(wide)
            for at, (cell, wide) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()
