"""Reads slices of a GGUF file, dequantised chunk by chunk directly into a rank's parameters.

Rows consist of whole quantisation blocks, so a slice of rows dequantises only those rows, and a slice of columns dequantises
the blocks that overlap it::

    columns wanted          [ 40 ................ 100 )
    blocks of 32     |  0  |##1##|##2##|##3##|  4  |      blocks 1-3 are dequantised, then cut to 40..100
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from placement.checkpoint.gguf.families import ARCHITECTURES, Architecture
from placement.checkpoint.gguf.gguf_file import TensorInfo
from placement.checkpoint.gguf.tensors import directory, read_sound_model
from placement.model.spec import ModelSpec

_CHUNK_ELEMENTS = 1 << 18
"""Elements dequantised at a time: 1 MiB in fp32, which stays in the CPU cache until it is written to the parameter."""


class GgufSource:
    """A `TensorSource` over one GGUF file, or over all parts of a split one."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        """Read the headers and map the files. Raises `ModelError`, which names the file and what is wrong with it."""
        model = read_sound_model(path)
        self.directory = directory(path, model, spec)
        self._infos = model.tensors
        self._data: dict[Path, NDArray[np.uint8]] | None = {file: np.memmap(file, mode="c") for file in model.files}
        known = ARCHITECTURES.get(str(model.fields.get("general.architecture")), Architecture())
        self._head_dim = spec.head_dim if known.permuted else None
        self._norm_offset = spec.norm_offset if known.gemma else 0.0

    def fill(self, name: str, dim: int, take: range, target: Tensor, slot: int | None = None) -> None:
        """See `TensorSource.fill`. Values are dequantised, and `take` must not have a step."""
        info = self._infos[self.directory.tensors[name].stored_name]
        blocks = self._rows(info)
        if slot is not None:
            blocks = blocks.reshape(info.shape[-1], -1, blocks.shape[1])[slot]
        target = target.unsqueeze(1) if target.dim() == 1 else target
        rows, columns = (take, range(target.shape[1])) if dim == 0 else (range(blocks.shape[0]), take)
        block, block_bytes = gguf.GGML_QUANT_SIZES[info.quantization]
        first, last = columns.start // block, -(-columns.stop // block)
        blocks = blocks[:, first * block_bytes : last * block_bytes]
        cut = slice(columns.start - first * block, columns.stop - first * block)
        step = max(1, _CHUNK_ELEMENTS // ((last - first) * block))
        for at in range(0, len(rows), step):
            chunk = self._stored(name, rows[at : at + step])
            values = gguf.dequantize(np.ascontiguousarray(blocks[chunk]), info.quantization)
            if name.endswith("norm.weight"):
                values = values - self._norm_offset  # llama.cpp adds Gemma's 1 to the weights it stores
            target[at : at + step].copy_(torch.from_numpy(values[:, cut]))

    def close(self) -> None:
        """See `TensorSource.close`."""
        self._data = None

    def _rows(self, info: TensorInfo) -> NDArray[np.uint8]:
        """Return the bytes of a tensor, [rows, bytes of a row], as a view of the mapped file.

        A vector has one element a row. The matrices of a stack follow one another.
        """
        assert self._data is not None, "the source is closed"
        rows = info.shape[0] if len(info.shape) == 1 else prod(info.shape[1:])
        return self._data[info.file][info.start : info.start + info.num_bytes].reshape(rows, -1)

    def _stored(self, name: str, rows: range) -> slice | NDArray[np.int64]:
        """Return where rows of the Hugging Face tensor are in the file.

        In a permuted head, the two halves that RoPE rotates together are interleaved: row ``half * d/2 + i`` of a head of d
        rows is stored at ``2 * i + half``.
        """
        projection = name.rsplit(".", 2)[-2]
        if self._head_dim is None or projection not in ("q_proj", "k_proj"):
            return slice(rows.start, rows.stop)
        head, row = np.divmod(np.arange(rows.start, rows.stop), self._head_dim)
        half, i = np.divmod(row, self._head_dim // 2)
        stored: NDArray[np.int64] = head * self._head_dim + 2 * i + half
        return stored
