"""The header of a GGUF file: its key-value fields and its tensor directory, without the tensor data.

``gguf.GGUFReader`` reads the same, but creates an array for every entry of every array: 4 s for the 49,152 tokens and merges of
SmolLM2. This reader skips arrays of more than `_LONGEST` entries (those of the tokenizer) unless they are requested.

    "GGUF" | version u32 | num_tensors u64 | num_fields u64
    fields:  name | type u32 | value          (array: type u32 | count u64 | entries)
    tensors: name | num_dims u32 | dims u64 * num_dims | type u32 | offset u64
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUF_MAGIC, GGMLQuantizationType, GGUFValueType

from placement.model.spec import ModelError

_VERSIONS = (2, 3)
_LONGEST = 1024
_MOST_TEXT = 1 << 24
_MOST_DIMS = 8
_LEAST_FIELD = 13
"""Size in bytes of the shortest field: an empty name, a type, a value of one byte."""
_LEAST_TENSOR = 24
"""Size in bytes of the shortest entry of the tensor directory: an empty name, no dimensions, a type, an offset."""
_LEAST_TEXT = 8

_FORMATS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


@dataclass(frozen=True)
class LongArray:
    """Placeholder for an array that was skipped, with its number of entries."""

    length: int


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the tensor directory. `shape` is in GGUF order, fastest dimension first: ``[inputs, outputs]`` for a
    matrix."""

    file: Path
    name: str
    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    start: int
    """First byte of the tensor's data in `file`."""

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the tensor's data in the file, as quantised there."""
        per_block, block_bytes = GGML_QUANT_SIZES[self.quantization]
        return prod(self.shape) // per_block * block_bytes


@dataclass(frozen=True)
class GGUFHeader:
    """The fields and tensors of a file. `data_start` is the byte at which the tensor data begins."""

    fields: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data_start: int


def is_gguf(path: Path) -> bool:
    """Whether the file at `path` starts with the GGUF magic number. Raises `OSError` if it cannot be opened."""
    with path.open("rb") as file:
        return file.read(4) == struct.pack("<I", GGUF_MAGIC)


def read_header(path: Path, long_arrays: bool = False) -> GGUFHeader:
    """Returns the header of a GGUF file: its fields and its tensor directory, without tensor data.

    Arrays of more than 1,024 entries (the tokenizer's) are skipped and returned as `LongArray`, unless `long_arrays` is True.
    Raises `OSError` if the file cannot be opened, and `ModelError` if it is not GGUF version 2 or 3, is truncated or is
    damaged.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        reader = _Reader(path, file, size, long_arrays)
        try:
            return reader.header()
        except (EOFError, ValueError, struct.error) as error:
            where = f"byte {file.tell()} of {size}, in {reader.reading}"
            raise ModelError(f"{path} is not a whole GGUF file: {error} ({where})") from None


class _Reader:
    """Sequential reader of a header. `reading` names the part being read, for error texts."""

    def __init__(self, path: Path, file: BinaryIO, size: int, long_arrays: bool) -> None:
        self._path = path
        self._file = file
        self._size = size
        self._long_arrays = long_arrays
        self.reading = "its first bytes"

    def header(self) -> GGUFHeader:
        """Returns the header, read from the start of the file. Raises `EOFError` if the file is too short, and `ValueError` or
        `struct.error` if it is not valid GGUF."""
        if self._take(4) != struct.pack("<I", GGUF_MAGIC):
            raise ValueError("it does not start with the letters GGUF")
        version = self._number("<I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not one of {_VERSIONS} (or the file is big-endian)")
        num_tensors, num_fields = self._number("<Q"), self._number("<Q")
        self._has_room(num_tensors, _LEAST_TENSOR, "tensors")
        self._has_room(num_fields, _LEAST_FIELD, "fields")
        fields = dict(self._field() for _ in range(num_fields))
        self.reading = "the tensor directory"
        tensors = self._tensors(num_tensors)
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        data_start = -(-self._file.tell() // alignment) * alignment
        tensors = {name: replace(tensor, start=data_start + tensor.start) for name, tensor in tensors.items()}
        self._all_data_is_there(tensors)
        return GGUFHeader(fields, tensors, data_start)

    def _has_room(self, count: int, least_bytes: int, what: str) -> None:
        """Raises `ValueError` if the rest of the file is too short for `count` entries. A damaged count would otherwise be
        followed to the end of the file, for hours if the count is large."""
        if count * least_bytes > self._size - self._file.tell():
            raise ValueError(f"it cannot hold the {count} {what} it is said to have")

    def _all_data_is_there(self, tensors: dict[str, TensorInfo]) -> None:
        """Raises `EOFError` if the data of a tensor is not complete: the header of an interrupted download is intact."""
        for tensor in tensors.values():
            self.reading = f"the data of tensor {tensor.name}"
            missing = tensor.start + tensor.num_bytes - self._size
            if missing > 0:
                raise EOFError(f"it ends {missing} bytes too early")

    def _field(self) -> tuple[str, Any]:
        name = self._text()
        self.reading = f"field {name}"
        return name, self._value(GGUFValueType(self._number("<I")))

    def _value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self._text()
        if kind is GGUFValueType.ARRAY:
            return self._array()
        value = self._number(_FORMATS[kind])
        # Use the shortest decimal of this float32: 1e-05, as in config.json, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind is GGUFValueType.FLOAT32 else value

    def _array(self) -> list[Any] | LongArray:
        kind, length = GGUFValueType(self._number("<I")), self._number("<Q")
        if kind is GGUFValueType.ARRAY:
            raise ValueError("arrays of arrays are not supported")
        self._has_room(length, _LEAST_TEXT if kind is GGUFValueType.STRING else struct.calcsize(_FORMATS[kind]), "entries")
        if length <= _LONGEST or (self._long_arrays and kind is GGUFValueType.STRING):
            return [self._value(kind) for _ in range(length)]
        if self._long_arrays:
            return self._numbers(_FORMATS[kind], length)
        if kind is GGUFValueType.STRING:
            for _ in range(length):
                self._skip(self._number("<Q"))
        else:
            self._skip(length * struct.calcsize(_FORMATS[kind]))
        return LongArray(length)

    def _numbers(self, form: str, length: int) -> list[Any]:
        return list(np.frombuffer(self._take(length * struct.calcsize(form)), np.dtype(form)).tolist())

    def _tensors(self, count: int) -> dict[str, TensorInfo]:
        """Returns the tensor directory, with offsets from the start of the tensor data in the place of `TensorInfo.start`."""
        tensors: dict[str, TensorInfo] = {}
        for tensor in (self._tensor() for _ in range(count)):
            if tensor.name in tensors:
                raise ValueError("an entry of that name was before it")
            tensors[tensor.name] = tensor
        return tensors

    def _tensor(self) -> TensorInfo:
        name = self._text()
        self.reading = f"the directory entry of tensor {name}"
        num_dims = self._number("<I")
        if num_dims > _MOST_DIMS:
            raise ValueError(f"{num_dims} dimensions")
        shape = tuple(self._number("<Q") for _ in range(num_dims))
        return TensorInfo(self._path, name, shape, GGMLQuantizationType(self._number("<I")), self._number("<Q"))

    def _text(self) -> str:
        length = self._number("<Q")
        if length > _MOST_TEXT:
            raise ValueError(f"a text of {length} bytes")
        return self._take(length).decode("utf-8", errors="replace")

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _take(self, length: int) -> bytes:
        data = self._file.read(length)
        if len(data) < length:
            raise EOFError(f"it ends {length - len(data)} bytes too early")
        return data

    def _skip(self, length: int) -> None:
        if self._file.tell() + length > self._size:
            raise EOFError("it ends too early")
        self._file.seek(length, 1)
