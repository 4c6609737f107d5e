"""Tiny models as GGUF files: fields and tensors as llama.cpp's converter writes them, matrices in any kind it has.

The `gguf` package cannot quantise to K-quants, so matrices of these kinds are made up: blocks of random bytes with sane
scales, which it can read back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray
from torch import Tensor

from tests.support.models.tiny_models import TinyModel

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
"""By ``model_type``."""

K_QUANTS: dict[str, dict[int, float]] = {
    "Q2_K": {80: 6e-3, 82: 6e-3},
    "Q3_K": {108: 1e-3},
    "Q4_K": {0: 3e-4, 2: 2e-3},
    "Q5_K": {0: 1.5e-4, 2: 2e-3},
    "Q6_K": {208: 6e-5},
}
"""Kinds in blocks of 256, and where a block has its scales (fp16): byte, size."""


def write_model(path: Path, model: TinyModel, kind: str, seed: int = 0) -> dict[str, Tensor]:
    """Write a whole model; returns what should be read back, by Hugging Face name, as float32."""
    config, spec = model.reference.config, model.spec
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], spec.num_layers)
    arch = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config.model_type]]
    writer = GGUFWriter(path, arch)
    _add_fields(writer, arch, model, config)
    rng = np.random.default_rng(seed)
    expected: dict[str, Tensor] = {}
    for name, x in model.state.items():
        if name == "lm_head.weight" and spec.tie_embeddings:
            continue
        module, leaf = name.rsplit(".", 1)
        stored = f"{names.get_name(module)}.{leaf}"
        if x.dim() == 1:
            writer.add_tensor(stored, (x + 1 if spec.norm_offset and "norm" in name else x).numpy())
            expected[name] = x
            continue
        data, its_kind = _quantised(x, kind, rng)
        read = torch.from_numpy(np.array(gguf.dequantize(data, its_kind)))
        expected[name] = read
        writer.add_tensor(stored, _converted(name, data, model), raw_dtype=its_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _quantised(x: Tensor, kind: str, rng: np.random.Generator) -> tuple[NDArray[Any], GGMLQuantizationType]:
    """Rows of blocks. A matrix whose rows are not whole blocks stays as it is, as in llama.cpp."""
    its_kind = GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[its_kind]
    if x.shape[1] % block:
        return x.numpy(), GGMLQuantizationType.F32
    if kind not in K_QUANTS:
        return gguf.quantize(x.numpy(), its_kind), its_kind
    blocks = rng.integers(0, 256, (x.shape[0] * x.shape[1] // block, block_bytes), dtype=np.uint8)
    for at, size in K_QUANTS[kind].items():
        scales = (rng.uniform(0.5, 1.5, len(blocks)) * size).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(x.shape[0], -1), its_kind


def _converted(name: str, data: NDArray[Any], model: TinyModel) -> NDArray[Any]:
    """The converter's reordering of q and k rows, where it does that: the two halves of each head are interleaved."""
    spec = model.spec
    for projection, heads in (("q_proj", spec.num_heads), ("k_proj", spec.num_kv_heads)):
        if spec.family in ("llama", "smollm3") and projection in name:
            return np.ascontiguousarray(data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape))
    return data


def _add_fields(writer: GGUFWriter, arch: str, model: TinyModel, config: Any) -> None:
    spec = model.spec
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_rope_dimension_count(spec.rope.rotary_dims or spec.head_dim)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if getattr(config, "sliding_window", None) is not None:
        writer.add_sliding_window(config.sliding_window)
    if spec.attention_softcap is not None:
        writer.add_attn_logit_softcapping(spec.attention_softcap)
    if spec.logit_softcap is not None:
        writer.add_final_logit_softcapping(spec.logit_softcap)
    if spec.rope.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(spec.rope.factor)
    if spec.rope.kind == "longrope":
        _add_longrope(writer, model)


def _add_longrope(writer: GGUFWriter, model: TinyModel) -> None:
    rope = model.spec.rope
    writer.add_rope_scaling_orig_ctx_len(rope.original_max_position)
    writer.add_rope_scaling_attn_factors((1 + np.log(rope.factor) / np.log(rope.original_max_position)) ** 0.5)
    for name in ("long", "short"):
        writer.add_tensor(f"rope_factors_{name}.weight", np.array(getattr(rope, f"{name}_factor"), np.float32))
