"""Slices of safetensors files: one ``model.safetensors``, or several named by ``model.safetensors.index.json``.

Files are mapped, and a slice is a view of the map: it costs page cache, which the kernel can take back, never memory.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from placement.model_spec import ModelError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_READABLE = {"F64", "F32", "F16", "BF16"}


class SafetensorsSource:
    """A `TensorSource` over safetensors files."""

    def __init__(self, path: Path) -> None:
        """Open every file of the checkpoint (headers only). Raises `ModelError` naming the file at fault."""
        self.location = str(path)
        self._files: dict[str, tuple[Path, Any]] = {}
        with ExitStack() as opened:
            for file in _files(path):
                self._add(file, opened)
            self._open = opened.pop_all()

    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        file, handle = self._files[name]
        view = handle.get_slice(name)
        if view.get_dtype() not in _READABLE:
            raise ModelError(
                f"{file}: tensor {name} has type {view.get_dtype()}, which cannot be read; "
                f"readable types are {', '.join(sorted(_READABLE))}"
            )
        return tuple(view.get_shape())

    def where(self, name: str) -> str:
        return str(self._files[name][0])

    def fill(self, name: str, dim: int, take: range, target: Tensor) -> None:
        cut = (slice(None),) * dim + (slice(take.start, take.stop),)
        target.copy_(self._files[name][1].get_slice(name)[cut])

    def close(self) -> None:
        self._files.clear()
        self._open.close()

    def _add(self, file: Path, opened: ExitStack) -> None:
        try:
            handle = opened.enter_context(safe_open(file, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: damaged or incomplete safetensors file ({error})") from error
        for name in handle.keys():  # noqa: SIM118 - a handle is not a mapping
            if name in self._files:
                raise ModelError(f"tensor {name} is in two files: {self._files[name][0]} and {file}")
            self._files[name] = (file, handle)


def _files(path: Path) -> list[Path]:
    """The files of a checkpoint; as in transformers, a single file goes before an index."""
    if path.is_file():
        return [path]
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    if (path / _INDEX).is_file():
        return _indexed(path / _INDEX)
    raise ModelError(f"{path}: no weights; looked for {_SINGLE} and {_INDEX} (pickled .bin files are not read)")


def _indexed(index: Path) -> list[Path]:
    """The files an index names, each once. Raises `ModelError` if the index is unreadable or a file is not there."""
    try:
        named = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError) as error:
        raise ModelError(f'{index}: unreadable; expected {{"weight_map": {{tensor: file}}}} ({error!r})') from error
    strange = [name for name in named if not isinstance(name, str) or Path(name).name != name]
    if strange:
        raise ModelError(f"{index}: weight_map names {strange[0]!r}, which is not a file beside the index")
    absent = sorted(name for name in named if not (index.parent / name).is_file())
    if absent:
        raise ModelError(f"{index}: {len(absent)} of {len(named)} files it names are not there: {', '.join(absent[:3])}")
    return [index.parent / name for name in sorted(named)]
