"""The tensor directory of safetensors files: one ``model.safetensors``, or several named by ``model.safetensors.index.json``.

The index names the file of each tensor. So a tensor may be in several files, as in a checkpoint whose changed tensors were
saved in a file of their own beside the original ones: the file that the index names counts.

    length u64 | header: {"name": {"dtype", "shape", "data_offsets": [begin, end]}, ...} | data

The library `safetensors` reads the same header, but its error for a truncated file does not say what is wrong.
"""

from __future__ import annotations

import json
from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from placement.checkpoint.directory.tensor_directory import TensorDirectory, TensorEntry
from placement.model.spec import ModelError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_MOST_HEADER = 100_000_000
"""Maximum size of the header in bytes, the format's own limit."""

_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_READABLE = ("BF16", "F16", "F32", "F64")

UnsignedInt = Annotated[int, Field(ge=0, strict=True)]


class AbsentWeights(ModelError):
    """The weights, or some of the files that hold them, are absent."""

    code = "absent_weights"


class _Stored(BaseModel):
    """One entry of a header."""

    model_config = ConfigDict(frozen=True)

    dtype: str
    shape: tuple[UnsignedInt, ...]
    data_offsets: tuple[UnsignedInt, UnsignedInt]


_HEADER = TypeAdapter(dict[str, _Stored])
_METADATA = TypeAdapter(dict[str, str] | None)


def read_directory(path: Path) -> TensorDirectory:
    """Returns the tensors of a Hugging Face folder, or of one safetensors file, from the headers. Raises `AbsentWeights` if the
    folder has no weights or lacks files that its index names, and `ModelError`, which names the file, if the index or a file is
    unreadable, damaged or incomplete, if the index names a file for a tensor that only another file has, or if it leaves open
    which of two files counts.

    A tensor that the index names but no file has is in `TensorDirectory.promised`.
    """
    index = path / _INDEX
    # As in transformers, a single file takes precedence over an index.
    single = next((file for file in (path, path / _SINGLE) if file.is_file()), None)
    if single is not None:
        return TensorDirectory(path, {entry.stored_name: entry for entry in _read_file(single)})
    if not index.is_file():
        raise AbsentWeights(f"{path}: no weights; looked for {_SINGLE} and {_INDEX} (pickled .bin files are not read)")
    file_of = _read_index(index)
    copies: dict[str, dict[Path, TensorEntry]] = defaultdict(dict)
    for file in sorted(set(file_of.values())):
        for entry in _read_file(file):
            copies[entry.stored_name][file] = entry
    tensors = {name: _chosen(name, found, file_of.get(name), index) for name, found in copies.items()}
    return TensorDirectory(path, tensors, {name: file for name, file in file_of.items() if name not in tensors})


def _chosen(name: str, copies: dict[Path, TensorEntry], named: Path | None, index: Path) -> TensorEntry:
    """Returns the copy of a tensor in the file that the index names, or the only copy of a tensor that it does not list."""
    if named is None and len(copies) == 1:
        return next(iter(copies.values()))
    if named is None:
        files = " and ".join(map(str, copies))
        raise ModelError(f"tensor {name} is in {len(copies)} files, {files}, and {index} does not say which counts")
    if named not in copies:
        raise ModelError(f"{index}: tensor {name} is said to be in {named.name}, but it is only in {next(iter(copies)).name}")
    return copies[named]


def _read_index(index: Path) -> dict[str, Path]:
    """Returns the file of each tensor that an index names. Raises `ModelError` if the index is unreadable or a file is
    absent."""
    try:
        weight_map = dict(json.loads(index.read_bytes())["weight_map"].items())
        named = set(weight_map.values())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError) as error:
        raise ModelError(f'{index}: unreadable; expected {{"weight_map": {{tensor: file}}}} ({error!r})') from error
    strange = [name for name in named if not isinstance(name, str) or Path(name).name != name]
    if strange:
        raise ModelError(f"{index}: weight_map names {strange[0]!r}, which is not a file beside the index")
    absent = sorted(name for name in named if not (index.parent / name).is_file())
    if absent:
        raise AbsentWeights(f"{index}: {len(absent)} of {len(named)} files it names are not there: {', '.join(absent[:3])}")
    return {name: index.parent / file for name, file in weight_map.items()}


def _read_file(file: Path) -> list[TensorEntry]:
    """Returns the tensors of one file, after a check that all data is present."""
    try:
        stored, data_start, data_bytes = _read_header(file)
        _check_data(stored, data_bytes)
    except (ValueError, OSError) as error:
        raise ModelError(f"{file}: damaged or incomplete safetensors file ({error})") from error
    return [_entry(file, name, each, data_start) for name, each in stored.items()]


def _entry(file: Path, name: str, stored: _Stored, data_start: int) -> TensorEntry:
    begin, end = stored.data_offsets
    data = range(data_start + begin, data_start + end)
    return TensorEntry(file, name, stored.shape, stored.dtype, data, _unreadable(stored.dtype))


def _unreadable(dtype: str) -> str | None:
    readable = f"which cannot be read; readable types are {', '.join(_READABLE)}"
    return None if dtype in _READABLE else f"has type {dtype}, {readable}"


def _read_header(file: Path) -> tuple[dict[str, _Stored], int, int]:
    """Returns the entries of the header, its end in the file, and the number of bytes that follow it. Raises `ValueError` or
    `OSError`."""
    with file.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(0)
        length, rest = int.from_bytes(stream.read(_LENGTH_BYTES), "little"), size - _LENGTH_BYTES
        if rest < 0:
            raise ValueError(f"it has {size} bytes, fewer than the {_LENGTH_BYTES} that say how long its header is")
        if length > rest:
            raise ValueError(f"its header is said to be {length} bytes long, but {rest} follow")
        if length > _MOST_HEADER:
            raise ValueError(f"its header is said to be {length} bytes long, and may be {_MOST_HEADER} at most")
        return _parse(stream.read(length)), _LENGTH_BYTES + length, rest - length


def _parse(header: bytes) -> dict[str, _Stored]:
    try:
        table = json.loads(header.decode("utf-8"), object_pairs_hook=_once)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"its header is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise ValueError("its header is not a table of tensors")
    try:
        _METADATA.validate_python(table.pop("__metadata__", None))
        return _HEADER.validate_python(table)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"in its header, {' '.join(map(str, first['loc']))}: {first['msg']}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the pairs as a table. Raises `ValueError` if a name occurs twice."""
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is twice in its header")
    return table


def _check_data(stored: dict[str, _Stored], data_bytes: int) -> None:
    """Check that each tensor's data has the length of its shape and type and begins where the one before ends, up to the end of
    the file.

    Raises `ValueError`.
    """
    expected = 0
    for name, each in sorted(stored.items(), key=lambda item: item[1].data_offsets):
        begin, end = each.data_offsets
        if each.dtype not in _BITS:
            raise ValueError(f"tensor {name} has the unknown type {each.dtype!r}")
        if begin != expected:
            raise ValueError(
                f"the data of tensor {name} is said to begin at {begin}, but the tensors before it end at {expected}"
            )
        if (end - begin) * 8 != prod(each.shape) * _BITS[each.dtype]:
            raise ValueError(
                f"tensor {name} is said to have {end - begin} bytes, which is not {each.dtype} of shape {list(each.shape)}"
            )
        expected = end
    if expected > data_bytes:
        raise ValueError(f"it ends {expected - data_bytes} bytes too early")
    if expected < data_bytes:
        raise ValueError(f"{data_bytes - expected} bytes follow the last tensor's data")
