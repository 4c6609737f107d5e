"""Split GGUF files: a model in several parts, found from any part or from their folder.

    big-00001-of-00003.gguf     split.no 0, split.count 3, split.tensors.count 291 | all fields | the first tensors
    big-00002-of-00003.gguf     split.no 1, split.count 3, split.tensors.count 291 |            | further tensors
    big-00003-of-00003.gguf     split.no 2, ...

The fields of a file say that it is a part, whatever its name is; names are only the fastest way to the other parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from placement.checkpoint.directory.header_fields import HeaderFields
from placement.checkpoint.gguf.gguf_file import GGUFHeader, TensorInfo, is_gguf, read_header
from placement.model.spec import ModelError

_PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_MOST_PARTS = 10_000
_PROJECTOR = "clip"
"""Architecture of the files with a multimodal model's vision part, which lie beside those of the decoder."""


@dataclass(frozen=True)
class GGUFModel:
    """A model in one GGUF file or in all parts of a split one. `headers` are in the order of the parts; `fields` are those of
    the first, `tensors` those of all."""

    headers: Mapping[Path, GGUFHeader]
    fields: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @property
    def files(self) -> tuple[Path, ...]:
        """The files, in the order of the parts."""
        return tuple(self.headers)


@dataclass(frozen=True)
class _Part:
    """One file: its number among the parts, counted from 0, and the number of parts."""

    file: Path
    number: int
    count: int
    num_tensors: int | None
    """Number of tensors in all parts together, if the file states it."""
    header: GGUFHeader

    @classmethod
    def read(cls, file: Path) -> _Part:
        """Returns the file, read from its header. Raises `ModelError` if it is damaged or cannot be read, or if its fields
        contradict each other."""
        try:
            header = read_header(file)
        except OSError as error:
            raise ModelError(f"{file}: cannot be read ({error})") from error
        fields = HeaderFields(file, header.fields)
        count = fields.whole("split.count", 0) or 1
        number = fields.whole("split.no", 0)
        if not 1 <= count <= _MOST_PARTS:
            raise fields.fault("split.count", f"must be from 1 to {_MOST_PARTS}")
        if not 0 <= number < count:
            raise fields.fault("split.no", f"must be from 0 to {count - 1}, because split.count is {count}")
        return cls(file, number, count, fields.whole("split.tensors.count", None), header)

    def goes_with(self, other: _Part) -> bool:
        """Whether `other` is a part of the same model, as far as the fields tell."""
        return (self.count, self.num_tensors) == (other.count, other.num_tensors)


def holds_gguf(folder: Path) -> bool:
    """Whether the model in `folder` is in GGUF files: it has some, and no ``config.json``. False if it is not a folder."""
    return folder.is_dir() and not (folder / "config.json").exists() and any(_gguf_files(folder))


def model_name(files: tuple[Path, ...]) -> str:
    """Returns the name of the model in `files` (those of a `GGUFModel`): that of the first one, without its number."""
    stem = files[0].stem
    match = _PART_NAME.fullmatch(stem)
    return match["stem"] if match is not None and len(files) > 1 else stem


def find_files(path: Path) -> tuple[Path, ...]:
    """Returns the GGUF files of one model, in the order of its parts. `path` is its only file, any of its parts, or a folder
    with these files and no other model.

    Raises `ModelError` if a file is damaged or cannot be read, if a part is missing or there twice, or if the folder has not
    exactly one model. The message names the files.
    """
    return tuple(part.file for part in _parts(path))


def read_model(path: Path, long_arrays: bool = False) -> GGUFModel:
    """Returns the fields and tensors of a GGUF model, without tensor data; `path` is as for `find_files`, and `long_arrays` as
    for `read_header`. Raises `ModelError` as `find_files` does, and if a tensor is in two parts or some are in none."""
    parts = _parts(path)
    first = parts[0]
    tensors: dict[str, TensorInfo] = {}
    for part in parts:
        for name, tensor in part.header.tensors.items():
            if name in tensors:
                raise ModelError(f"tensor {name} is in two parts: {tensors[name].file} and {part.file}")
            tensors[name] = tensor
    if first.count > 1 and first.num_tensors not in (None, len(tensors)):
        raise ModelError(
            f"{first.file}: split.tensors.count is {first.num_tensors}, but the {first.count} parts have {len(tensors)} tensors"
        )
    fields = read_header(first.file, long_arrays).fields if long_arrays else first.header.fields
    return GGUFModel({part.file: part.header for part in parts}, fields, tensors)


def _parts(path: Path) -> list[_Part]:
    return _all_parts(_Part.read(path)) if not path.is_dir() else _only_model(path)


def _all_parts(given: _Part) -> list[_Part]:
    """Returns all parts of the model that `given` is a part of."""
    if given.count == 1:
        return [given]
    found = {given.number: given}
    for file in _named_alike(given.file):
        _add(found, given, file)
    if len(found) < given.count:
        for file in _gguf_files(given.file.parent):
            _add(found, given, file)
    missing = [number for number in range(given.count) if number not in found]
    if missing:
        shown = ", ".join(_described(given, number) for number in missing[:3])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelError(
            f"{given.file} is part {given.number + 1} of {given.count}, but in {given.file.parent} there is no {shown}{more}"
        )
    return [found[number] for number in range(given.count)]


def _add(found: dict[int, _Part], given: _Part, file: Path) -> None:
    """Adds the part in `file` to `found`, if it is one of the same model."""
    if any(file == part.file for part in found.values()):
        return
    part = _Part.read(file)
    if not part.goes_with(given):
        return
    if part.number in found:
        raise ModelError(f"{found[part.number].file} and {file} are both part {part.number + 1} of {part.count}")
    found[part.number] = part


def _named_alike(file: Path) -> list[Path]:
    """Returns the files that are the other parts by their names, as far as they are there."""
    match = _PART_NAME.fullmatch(file.stem)
    if match is None:
        return []
    pattern = re.compile(rf"{re.escape(match['stem'])}-\d{{5}}-of-{match['count']}{re.escape(file.suffix)}")
    return sorted(other for other in file.parent.iterdir() if pattern.fullmatch(other.name) and other.is_file())


def _described(given: _Part, number: int) -> str:
    """Returns the part with the given number as text, with the file name it should have if names follow the usual form."""
    match = _PART_NAME.fullmatch(given.file.stem)
    name = f" ({match['stem']}-{number + 1:05}-of-{match['count']}{given.file.suffix})" if match is not None else ""
    return f"part {number + 1}{name}"


def _only_model(folder: Path) -> list[_Part]:
    """Returns the parts of the only model in `folder`."""
    models: list[list[_Part]] = []
    seen: set[Path] = set()
    for file in _gguf_files(folder):
        if file in seen:
            continue
        part = _Part.read(file)
        if part.header.fields.get("general.architecture") == _PROJECTOR:
            continue
        models.append(_all_parts(part))
        seen |= {each.file for each in models[-1]}
    if len(models) == 1:
        return models[0]
    if not models:
        raise ModelError(f"{folder}: no GGUF file of a language model")
    names = ", ".join(parts[0].file.name for parts in models[:5])
    raise ModelError(f"{folder}: {len(models)} models in GGUF files ({names}); give one of these files")


def _gguf_files(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.iterdir()):
        if file.suffix.lower() == ".gguf" and file.is_file() and _starts_as_gguf(file):
            yield file


def _starts_as_gguf(file: Path) -> bool:
    try:
        return is_gguf(file)
    except OSError:
        return False
