"""Text in aligned columns, the table format of all reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def columns(rows: Sequence[Sequence[str]], right: set[int]) -> Iterator[str]:
    """Yields rows of text in aligned columns, indented by two. The columns in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(wide) if at in right else cell.ljust(wide)
            for at, (cell, wide) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()
