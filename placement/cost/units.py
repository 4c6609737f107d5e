"""Numbers of bytes as text."""

from __future__ import annotations


def size_text(num_bytes: float) -> str:
    """Bytes in the largest binary unit that leaves at least one: ``32 MiB``, ``1.5 GiB``."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while num_bytes >= 1024 and len(units) > 1:
        num_bytes, units = num_bytes / 1024, units[1:]
    return f"{num_bytes:,.1f}".removesuffix(".0") + f" {units[0]}"
