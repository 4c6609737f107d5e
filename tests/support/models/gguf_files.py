"""Small GGUF files, written as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from placement.model.spec import ModelSpec
from tests.support.models.checkpoint_checks import Weights

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}


def write_gguf(path: Path, weights: Weights, spec: ModelSpec, kind: str, extra: Weights | None = None) -> Weights:
    """Write a checkpoint with its matrices quantised to `kind`; returns what should be read back, by Hugging Face name."""
    names = gguf.get_tensor_name_map(ARCHITECTURES[spec.family], spec.num_layers)
    writer = gguf.GGUFWriter(path, spec.family)
    writer.add_block_count(spec.num_layers)
    writer.add_token_list(["a", "bc", "é"])
    writer.add_token_scores([0.0, 1.0, 2.0])
    expected = {}
    for name, x in weights.items():
        module, leaf = name.rsplit(".", 1)
        its_kind = gguf.GGMLQuantizationType[kind if x.dim() == 2 else "F32"]
        data = gguf.quantize(_converted(name, x, spec).numpy(), its_kind)
        writer.add_tensor(f"{names.get_name(module)}.{leaf}", data, raw_dtype=its_kind)
        expected[name] = torch.from_numpy(np.array(gguf.dequantize(gguf.quantize(x.numpy(), its_kind), its_kind)))
    for name, x in (extra or {}).items():
        writer.add_tensor(name, x.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _converted(name: str, x: Tensor, spec: ModelSpec) -> Tensor:
    """The converter's reordering of q and k in a llama: the two halves of each head are interleaved."""
    for projection, heads in (("q_proj", spec.num_heads), ("k_proj", spec.num_kv_heads)):
        if spec.family == "llama" and projection in name:
            return x.reshape(heads, 2, -1, *x.shape[1:]).transpose(1, 2).reshape(x.shape).contiguous()
    return x
