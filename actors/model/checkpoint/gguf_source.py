"""Slices of a GGUF file, dequantised chunk by chunk straight into a rank's parameters.

Rows hold whole quantisation blocks, so a slice of rows dequantises those rows and no others, and a slice of columns
dequantises the blocks that overlap it::

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

from actors.model.checkpoint.gguf_names import hugging_face_name
from placement.gguf_families import ARCHITECTURES, Architecture
from placement.gguf_file import GGUFHeader, TensorInfo, read_header
from placement.model_spec import ModelError, ModelSpec

_CHUNK_ELEMENTS = 1 << 18
"""Elements dequantised at once: 1 MiB in fp32, which stays in cache until it is written to the parameter."""


class GgufSource:
    """A `TensorSource` over one GGUF file."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        """Read the header and map the file. Raises `ModelError` naming the file and what is wrong with it."""
        self.location = str(path)
        header = _read_header(path)
        self._infos = {hugging_face_name(info.name, spec): info for info in header.tensors.values()}
        self._data: NDArray[np.uint8] | None = np.memmap(path, mode="c")[header.data_start :]
        known = ARCHITECTURES.get(str(header.fields.get("general.architecture")), Architecture())
        self._head_dim = spec.head_dim if known.permuted else None
        self._norm_offset = spec.norm_offset if known.gemma else 0.0

    def names(self) -> set[str]:
        return set(self._infos)

    def shape(self, name: str) -> tuple[int, ...]:
        info = self._infos[name]
        block, block_bytes = gguf.GGML_QUANT_SIZES[info.quantization]
        try:
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), info.quantization)
        except NotImplementedError as error:
            raise ModelError(f"{self.where(name)} has type {info.quantization.name}, which cannot be dequantised") from error
        if len(info.shape) == 1 and block > 1:
            raise ModelError(f"{self.where(name)} is a vector of type {info.quantization.name}; must be F32, F16 or BF16")
        return info.shape[::-1]

    def where(self, name: str) -> str:
        return f"{self.location}: {self._infos[name].name}"

    def fill(self, name: str, dim: int, take: range, target: Tensor) -> None:
        info = self._infos[name]
        blocks = self._rows(info)
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
        self._data = None

    def _rows(self, info: TensorInfo) -> NDArray[np.uint8]:
        """The bytes of a tensor, [rows, bytes of a row]; a vector is one element a row. A view of the mapped file."""
        assert self._data is not None, "the source is closed"
        return self._data[info.offset : info.offset + info.num_bytes].reshape(info.shape[-1], -1)

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


def _read_header(path: Path) -> GGUFHeader:
    """The header, if its tensors are in whole blocks and lie one after the other, as the format has it.

    A damaged size or type would else read the bytes of a neighbour as weights.
    """
    try:
        header = read_header(path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error})") from error
    if header.fields.get("split.count", 0) not in (0, 1):
        raise ModelError(f"{path}: one of {header.fields['split.count']} parts; join them with llama-gguf-split --merge")
    alignment, expected = header.fields.get("general.alignment", 32), 0
    for info in header.tensors.values():
        block, _ = gguf.GGML_QUANT_SIZES[info.quantization]
        if prod(info.shape) == 0 or not info.shape or info.shape[0] % block:
            raise ModelError(
                f"{path}: damaged GGUF file (tensor {info.name} of shape {list(info.shape[::-1])} "
                f"is not in whole {info.quantization.name} blocks of {block})"
            )
        if info.offset != expected:
            raise ModelError(
                f"{path}: damaged GGUF file (the data of tensor {info.name} is said to begin at {info.offset}, "
                f"but the tensors before it end at {expected})"
            )
        expected = -(-(info.offset + info.num_bytes) // alignment) * alignment
    return header
