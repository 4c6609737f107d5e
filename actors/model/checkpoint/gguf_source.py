"""Slices of a GGUF file, dequantised chunk by chunk straight into a rank's parameters.

Rows hold whole quantisation blocks, so a slice of rows dequantises those rows and no others, and a slice of columns
dequantises the blocks that overlap it::

    columns wanted          [ 40 ................ 100 )
    blocks of 32     |  0  |##1##|##2##|##3##|  4  |      blocks 1-3 are dequantised, then cut to 40..100
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.model.checkpoint.gguf_names import hugging_face_name
from actors.model.checkpoint.gguf_table import Entry, read_table
from placement.model_spec import ModelError, ModelSpec

_CHUNK_ELEMENTS = 1 << 18
"""Elements dequantised at once: 1 MiB in fp32, which stays in cache until it is written to the parameter."""

_PERMUTED_ARCHITECTURES = {"llama"}
"""Architectures whose q and k rows the converter reorders for an interleaved rope. qwen2 and qwen3 keep theirs."""


class GgufSource:
    """A `TensorSource` over one GGUF file."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        """Read the header and map the file. Raises `ModelError` naming the file and what is wrong with it."""
        self.location = str(path)
        table = read_table(path)
        if int(table.settings.get("split.count", 0)) > 1:
            raise ModelError(f"{path}: one of {table.settings['split.count']} parts; join them with llama-gguf-split --merge")
        self._entries = {hugging_face_name(entry.name): entry for entry in table.tensors.values()}
        self._data: NDArray[np.uint8] | None = np.memmap(path, mode="c")
        permuted = table.settings.get("general.architecture") in _PERMUTED_ARCHITECTURES
        self._head_dim = spec.head_dim if permuted else None
        self._check_rope(spec)

    def names(self) -> set[str]:
        return set(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        entry = self._entries[name]
        block, block_bytes = gguf.GGML_QUANT_SIZES[entry.kind]
        try:
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), entry.kind)
        except NotImplementedError as error:
            raise ModelError(f"{self.where(name)} has type {entry.kind.name}, which cannot be dequantised") from error
        if len(entry.shape) == 1 and block > 1:
            raise ModelError(f"{self.where(name)} is a vector quantised to {entry.kind.name}; vectors must be F32, F16 or BF16")
        return entry.shape

    def where(self, name: str) -> str:
        return f"{self.location}: {self._entries[name].name}"

    def fill(self, name: str, dim: int, take: range, target: Tensor) -> None:
        entry = self._entries[name]
        blocks = self._rows(entry)
        target = target.unsqueeze(1) if target.dim() == 1 else target
        rows, columns = (take, range(target.shape[1])) if dim == 0 else (range(blocks.shape[0]), take)
        block, block_bytes = gguf.GGML_QUANT_SIZES[entry.kind]
        first, last = columns.start // block, -(-columns.stop // block)
        blocks = blocks[:, first * block_bytes : last * block_bytes]
        cut = slice(columns.start - first * block, columns.stop - first * block)
        step = max(1, _CHUNK_ELEMENTS // ((last - first) * block))
        for at in range(0, len(rows), step):
            chunk = self._stored(name, rows[at : at + step])
            values = gguf.dequantize(np.ascontiguousarray(blocks[chunk]), entry.kind)
            target[at : at + step].copy_(torch.from_numpy(values[:, cut]))

    def close(self) -> None:
        self._data = None

    def _rows(self, entry: Entry) -> NDArray[np.uint8]:
        """The bytes of a tensor, [rows, bytes of a row]; a vector is one element a row. A view of the mapped file."""
        assert self._data is not None, "the source is closed"
        return self._data[entry.offset : entry.offset + entry.num_bytes].reshape(entry.shape[0], -1)

    def _stored(self, name: str, rows: range) -> slice | NDArray[np.int64]:
        """Where rows of the Hugging Face tensor are in the file.

        In a permuted head, the two halves that rope turns together lie interleaved: row ``half * d/2 + i`` of a head of
        d rows is stored at ``2 * i + half``.
        """
        projection = name.rsplit(".", 2)[-2]
        if self._head_dim is None or projection not in ("q_proj", "k_proj"):
            return slice(rows.start, rows.stop)
        head, row = np.divmod(np.arange(rows.start, rows.stop), self._head_dim)
        half, i = np.divmod(row, self._head_dim // 2)
        stored: NDArray[np.int64] = head * self._head_dim + 2 * i + half
        return stored

    def _check_rope(self, spec: ModelSpec) -> None:
        """Scaled rope frequencies are stored as a tensor; leaving it unread is right only if the spec scales them too."""
        entry: Any = self._entries.get("rope_freqs.weight")
        if entry is None or spec.rope.kind != "default":
            return
        if np.any(gguf.dequantize(np.array(self._rows(entry)), entry.kind) != 1):
            raise ModelError(
                f"{self.where('rope_freqs.weight')} scales the rope frequencies, but the model's rope kind is "
                f"{spec.rope.kind!r}; give the Hugging Face folder, whose config.json states the scaling"
            )
