"""The tensor directory of a GGUF file: Hugging Face names and shapes for the tensors in its header."""

from __future__ import annotations

from functools import cache
from math import prod
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from placement.checkpoint.directory.tensor_directory import TensorDirectory, TensorEntry
from placement.checkpoint.gguf.gguf_file import GGUFHeader, TensorInfo, read_header
from placement.checkpoint.gguf.names import hugging_face_name
from placement.model.spec import ModelError, ModelSpec


def read_sound_header(path: Path) -> GGUFHeader:
    """Returns the header of a GGUF file, after a check that its tensors consist of whole blocks and lie one after the other.

    A damaged size or type would otherwise read a neighbour's bytes as weights. Raises `ModelError` if the file cannot be read,
    is damaged, or is one of several parts of a split file.
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


def directory(path: Path, header: GGUFHeader, spec: ModelSpec) -> TensorDirectory:
    """Returns the tensors of `header` (the header of the file `path`) by their Hugging Face names in a model of `spec`, with
    shapes in Hugging Face order. Raises `ModelError` if two tensors have the same Hugging Face name."""
    tensors: dict[str, TensorEntry] = {}
    for info in header.tensors.values():
        name = hugging_face_name(info.name, spec)
        if name in tensors:
            raise ModelError(f"{path}: tensors {tensors[name].stored_name} and {info.name} are both {name}")
        begin = header.data_start + info.offset
        data = range(begin, begin + info.num_bytes)
        tensors[name] = TensorEntry(path, info.name, info.shape[::-1], info.quantization.name, data, _unreadable(info))
    return TensorDirectory(path, tensors)


def _unreadable(info: TensorInfo) -> str | None:
    if not _can_be_dequantised(info.quantization):
        return f"has type {info.quantization.name}, which cannot be dequantised"
    block, _ = gguf.GGML_QUANT_SIZES[info.quantization]
    if len(info.shape) == 1 and block > 1:
        return f"is a vector of type {info.quantization.name}; must be F32, F16 or BF16"
    return None


@cache
def _can_be_dequantised(quantization: GGMLQuantizationType) -> bool:
    _, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    try:
        gguf.dequantize(np.zeros((1, block_bytes), np.uint8), quantization)
    except NotImplementedError:
        return False
    return True
