"""The tensor directory of a GGUF file: Hugging Face names and shapes for the tensors in its header."""

from __future__ import annotations

from functools import cache
from math import prod
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from placement.checkpoint.directory.tensor_directory import TensorDirectory, TensorEntry
from placement.checkpoint.gguf.gguf_file import GGUFHeader, TensorInfo
from placement.checkpoint.gguf.names import hugging_face_name
from placement.checkpoint.gguf.split import GGUFModel, read_model
from placement.model.spec import ModelError, ModelSpec


def read_sound_model(path: Path) -> GGUFModel:
    """Returns the fields and tensors of a GGUF model, after a check that the tensors of each file consist of whole blocks and
    lie one after the other.

    `path` is as for `placement.checkpoint.gguf.split.find_files`. A damaged size or type would otherwise read a neighbour's
    bytes as weights. Raises `ModelError` if a file cannot be read or is damaged, or if parts of the model are missing.
    """
    model = read_model(path)
    for file, header in model.headers.items():
        _check_data(file, header)
    return model


def _check_data(path: Path, header: GGUFHeader) -> None:
    alignment, expected = header.fields.get("general.alignment", 32), header.data_start
    for info in header.tensors.values():
        block, _ = gguf.GGML_QUANT_SIZES[info.quantization]
        if prod(info.shape) == 0 or not info.shape or info.shape[0] % block:
            raise ModelError(
                f"{path}: damaged GGUF file (tensor {info.name} of shape {list(info.shape[::-1])} "
                f"is not in whole {info.quantization.name} blocks of {block})"
            )
        if info.start != expected:
            raise ModelError(
                f"{path}: damaged GGUF file (the data of tensor {info.name} is said to begin at "
                f"{info.start - header.data_start}, but the tensors before it end at {expected - header.data_start})"
            )
        expected = -(-(info.start + info.num_bytes) // alignment) * alignment


def directory(path: Path, model: GGUFModel, spec: ModelSpec) -> TensorDirectory:
    """Returns the tensors of `model` by their Hugging Face names in a model of `spec`, with shapes in Hugging Face order.
    `path` is the model's location. Raises `ModelError` if two tensors have the same Hugging Face name."""
    tensors: dict[str, TensorEntry] = {}
    for info in model.tensors.values():
        name = hugging_face_name(info.name, spec)
        if name in tensors:
            raise ModelError(f"{path}: tensors {tensors[name].stored_name} and {info.name} are both {name}")
        data = range(info.start, info.start + info.num_bytes)
        tensors[name] = TensorEntry(info.file, info.name, info.shape[::-1], info.quantization.name, data, _unreadable(info))
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
