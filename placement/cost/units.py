"""Byte sizes: formatting, parsing, and an annotated type for configuration fields."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

_UNITS = {"": 1, **{unit: 1000**power for power, unit in enumerate("KMGTP", 1)}}
_UNITS |= {f"{unit}I": 1024**power for power, unit in enumerate("KMGTP", 1)}


def size_text(num_bytes: float) -> str:
    """Returns a number of bytes as text, in the largest binary unit (up to TiB) that gives at least 1, with one decimal: ``32
    MiB``, ``1.5 GiB``."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while num_bytes >= 1024 and len(units) > 1:
        num_bytes, units = num_bytes / 1024, units[1:]
    return f"{num_bytes:,.1f}".removesuffix(".0") + f" {units[0]}"


def parse_size(value: Any) -> Any:
    """Returns the number of bytes, an int, given by a text such as ``2GiB`` (binary), ``512M`` (decimal), ``1.5G`` or ``4096``;
    returns other types unchanged.

    Raises `ValueError` for any other text.
    """
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGTP]I?|)B?\s*", value.upper())
    if found is None:
        raise ValueError("must be a number of bytes, or one with a unit as in 512MiB or 2G")
    return int(float(found[1]) * _UNITS[found[2]])


ByteCount = Annotated[int, BeforeValidator(parse_size)]
"""Number of bytes, which may be given as text with a unit (`parse_size`)."""
