"""Safetensors files made without torch: headers as given, data of zeros."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from placement.model.spec import ModelSpec
from placement.ownership.shards import parameters, whole_model

BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I8": 1, "F8_E4M3": 1}

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
"""(type, shape) by name."""


def header_of(tensors: Tensors) -> dict[str, Any]:
    """The header of a file that has these tensors, in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    return header


def as_bytes(header: dict[str, Any] | bytes, data_bytes: int) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data_bytes)


def write(file: Path, tensors: Tensors) -> Path:
    """A sound file."""
    file.write_bytes(as_bytes(header_of(tensors), sum(prod(shape) * BYTES[dtype] for dtype, shape in tensors.values())))
    return file


def tensors_of(spec: ModelSpec, dtype: str = "F32") -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor of a model."""
    slices = [weight_slice for parameter in parameters(spec, whole_model(spec)) for weight_slice in parameter.slices]
    return {weight_slice.source: (dtype, weight_slice.source_shape) for weight_slice in slices}
