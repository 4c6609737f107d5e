"""Numbers of bytes: as text, from text, and as the type of a field that a person writes."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

_UNITS = {"": 1, **{unit: 1000**power for power, unit in enumerate("KMGTP", 1)}}
_UNITS |= {f"{unit}I": 1024**power for power, unit in enumerate("KMGTP", 1)}


def size_text(num_bytes: float) -> str:
    """Bytes in the largest binary unit that leaves at least one: ``32 MiB``, ``1.5 GiB``."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while num_bytes >= 1024 and len(units) > 1:
        num_bytes, units = num_bytes / 1024, units[1:]
    return f"{num_bytes:,.1f}".removesuffix(".0") + f" {units[0]}"


def parse_size(value: Any) -> Any:
    """The bytes that a text such as ``2GiB``, ``512M`` or ``4096`` means; what is no text is returned as it is.

    Raises `ValueError` on another text.
    """
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGTP]I?|)B?\s*", value.upper())
    if found is None:
        raise ValueError("must be a number of bytes, or one with a unit as in 512MiB or 2G")
    return int(float(found[1]) * _UNITS[found[2]])


ByteCount = Annotated[int, BeforeValidator(parse_size)]
"""A number of bytes, which may be written with a unit (`parse_size`)."""
