"""A small llama as one GGUF file, or split into parts as llama.cpp's writer splits it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

NUM_PARAMETERS = 45_264
_LAYER = {
    "attn_norm": (48,),
    "attn_q": (48, 48),
    "attn_k": (16, 48),
    "attn_v": (16, 48),
    "attn_output": (48, 48),
    "ffn_norm": (48,),
    "ffn_gate": (80, 48),
    "ffn_up": (80, 48),
    "ffn_down": (48, 80),
}


def write_split(path: Path, tensors_per_part: int = 0) -> list[Path]:
    """Writes a model of two layers, with a head of its own and without a tokenizer; returns its files. 0: one file."""
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=tensors_per_part)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(48)
    writer.add_feed_forward_length(80)
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(101)
    layers = {f"blk.{layer}.{name}": shape for layer in range(2) for name, shape in _LAYER.items()}
    rng = np.random.default_rng(1)
    for name, shape in {"token_embd": (101, 48), **layers, "output_norm": (48,), "output": (101, 48)}.items():
        x = rng.standard_normal(shape) * shape[-1] ** -0.5 if len(shape) > 1 else np.ones(shape)
        writer.add_tensor(f"{name}.weight", x.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}*.gguf"))
