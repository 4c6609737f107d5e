"""The header of a GGUF file: a few settings, and where each tensor lies.

The `gguf` package's own reader makes an array object of every token of the vocabulary (for a 98 MB file: 2 s and
160 MB, more than the weights of a small rank) and loops without end on some damaged files. This one steps over arrays,
and trusts no count or offset before it has been held against the size of the file.

    magic version | tensor count | setting count | settings | tensor infos | padding | tensor data, each padded
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from placement.model_spec import ModelError

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""struct format of each scalar value type of the file format."""

_VERSIONS = (2, 3)
_MAX_DIMS = 4
_INFO_BYTES = 24
"""Smallest tensor info: an empty name, no dimensions, a type, an offset."""

Value = int | float | bool | str


@dataclass(frozen=True)
class Entry:
    """One tensor. `shape` is in torch order (rows first); its bytes are ``[offset, offset + num_bytes)`` of the file."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Table:
    """What a header says: settings that are not arrays, and the tensors by name."""

    settings: dict[str, Value]
    tensors: dict[str, Entry]


class _Cursor:
    """Reads a mapped file front to back, never past its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data = path, data
        self.at, self.size = 0, len(data)

    def damaged(self, what: str) -> ModelError:
        return ModelError(f"{self._path}: damaged or incomplete GGUF file ({what}, near byte {self.at} of {self.size})")

    def skip(self, num_bytes: int) -> int:
        """Step over bytes; returns where they start."""
        if num_bytes > self.size - self.at:
            raise self.damaged(f"{num_bytes} bytes wanted past the end of the file")
        start, self.at = self.at, self.at + num_bytes
        return start

    def number(self, layout: str) -> Value:
        value: Value = struct.unpack_from(layout, self._data, self.skip(struct.calcsize(layout)))[0]
        return value

    def count(self, layout: str = "<Q") -> int:
        return int(self.number(layout))

    def string(self) -> str:
        length = self.count()
        start = self.skip(length)
        try:
            return self._data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self.damaged("a name that is not UTF-8") from error

    def skip_array(self) -> None:
        kind, length = self.count("<I"), self.count()
        if kind in _SCALARS:
            self.skip(length * struct.calcsize(_SCALARS[kind]))
        elif kind == _STRING:
            for _ in range(length):
                self.skip(self.count())
        else:
            raise self.damaged(f"an array of unknown value type {kind}")


def read_table(path: Path) -> Table:
    """Read the header of a GGUF file. Raises `ModelError` naming the file and what is wrong with it."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(_Cursor(path, data))
    except ModelError:
        raise
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelError(f"{path}: cannot be read ({error})") from error


def _read(cursor: _Cursor) -> Table:
    if cursor.count("<I") != int.from_bytes(b"GGUF", "little"):
        raise cursor.damaged("it does not begin with GGUF")
    version = cursor.count("<I")
    if version not in _VERSIONS:
        raise cursor.damaged(f"version {version}; versions {_VERSIONS} in little-endian order can be read")
    num_tensors, num_settings = cursor.count(), cursor.count()
    settings = _settings(cursor, num_settings)
    if num_tensors > (cursor.size - cursor.at) // _INFO_BYTES:
        raise cursor.damaged(f"{num_tensors} tensors announced")
    alignment = settings.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.damaged(f"general.alignment is {alignment}, not a power of two")
    infos = [_info(cursor) for _ in range(num_tensors)]
    return Table(settings, _place(cursor, infos, alignment))


def _settings(cursor: _Cursor, count: int) -> dict[str, Value]:
    settings: dict[str, Value] = {}
    for _ in range(count):
        key, kind = cursor.string(), cursor.count("<I")
        if kind in _SCALARS:
            settings[key] = cursor.number(_SCALARS[kind])
        elif kind == _STRING:
            settings[key] = cursor.string()
        elif kind == _ARRAY:
            cursor.skip_array()
        else:
            raise cursor.damaged(f"setting {key!r} has unknown value type {kind}")
    return settings


def _info(cursor: _Cursor) -> Entry:
    """One tensor info, its offset still counted from the start of the tensor data."""
    name, num_dims = cursor.string(), cursor.count("<I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.damaged(f"tensor {name} has {num_dims} dimensions")
    shape = tuple(cursor.count() for _ in range(num_dims))[::-1]
    kind, offset = cursor.count("<I"), cursor.count()
    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError) as error:
        raise cursor.damaged(f"tensor {name} has unknown type {kind}") from error
    if prod(shape) == 0 or shape[-1] % block:
        raise cursor.damaged(f"tensor {name} of shape {list(shape)} is not in whole blocks of {block}")
    return Entry(name, GGMLQuantizationType(kind), shape, offset, prod(shape) // block * block_bytes)


def _place(cursor: _Cursor, infos: list[Entry], alignment: int) -> dict[str, Entry]:
    """Entries with offsets from the start of the file. The format packs tensors in order, each padded to `alignment`."""
    start = -(-cursor.at // alignment) * alignment
    placed: dict[str, Entry] = {}
    expected = 0
    for info in infos:
        if info.offset != expected or info.name in placed:
            raise cursor.damaged(f"tensor {info.name} at offset {info.offset} of the data, expected once, at {expected}")
        if start + info.offset + info.num_bytes > cursor.size:
            raise cursor.damaged(f"tensor {info.name} ends at byte {start + info.offset + info.num_bytes}")
        placed[info.name] = Entry(info.name, info.kind, info.shape, start + info.offset, info.num_bytes)
        expected = -(-(info.offset + info.num_bytes) // alignment) * alignment
    return placed
