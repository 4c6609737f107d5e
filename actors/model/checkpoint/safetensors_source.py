"""Reads slices of safetensors files. The files are memory-mapped and a slice is a view of the map: it occupies only page cache,
which the kernel can reclaim."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from placement.checkpoint.directory.tensor_directory import TensorDirectory
from placement.model.spec import ModelError


class SafetensorsSource:
    """A `TensorSource` over safetensors files."""

    def __init__(self, directory: TensorDirectory) -> None:
        """Open every file that `directory` names (headers only). Raises `ModelError`, which names the faulty file."""
        self.directory = directory
        with ExitStack() as opened:
            files = {entry.file for entry in self.directory.tensors.values()}
            self._handles = {file: _open(file, opened) for file in files}
            self._open = opened.pop_all()

    def fill(self, name: str, dim: int, take: range, target: Tensor, slot: int | None = None) -> None:
        """See `TensorSource.fill`."""
        entry, before = self.directory.tensors[name], (slice(None),) * dim
        whole = self._handles[entry.file].get_slice(entry.stored_name)
        run = whole[(*(() if slot is None else (slot,)), *before, slice(take.start, take.stop))]
        target.copy_(run[(*before, slice(None, None, take.step))])

    def close(self) -> None:
        """See `TensorSource.close`."""
        self._handles.clear()
        self._open.close()


def _open(file: Path, opened: ExitStack) -> Any:
    try:
        return opened.enter_context(safe_open(file, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: damaged or incomplete safetensors file ({error})") from error
