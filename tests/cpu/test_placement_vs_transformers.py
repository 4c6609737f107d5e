"""Our reading of config.json against the config classes of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from placement.checkpoint_header import read

FAMILIES = (LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config)
REQUIRED = {"hidden_size": 4096, "num_hidden_layers": 6, "num_attention_heads": 32, "intermediate_size": 64, "vocab_size": 101}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
CASES: dict[str, dict[str, object]] = {
    "silent": {},
    "llama3": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
    "windows": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    "no window": {"use_sliding_window": True, "sliding_window": None},
    "heads": {"num_key_value_heads": 4, "head_dim": 64, "eos_token_id": [3, 4], "bos_token_id": None},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_sparse_and_saved_configs_are_read_as_transformers_reads_them(
    tmp_path: Path, family: type[PretrainedConfig], case: str
) -> None:
    sparse, saved = tmp_path / "sparse", tmp_path / "saved"
    sparse.mkdir()
    (sparse / "config.json").write_text(json.dumps({"model_type": family.model_type, **REQUIRED, **CASES[case]}))
    theirs = AutoConfig.from_pretrained(sparse)
    theirs.save_pretrained(saved)

    ours = read(sparse)
    assert read(saved) == ours
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert (ours.max_position, ours.norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    assert (ours.bos_token_id, ours.tie_embeddings) == (theirs.bos_token_id, theirs.tie_word_embeddings)
    eos = theirs.eos_token_id
    assert list(ours.eos_token_ids) == (eos if isinstance(eos, list) else [] if eos is None else [eos])
    assert (ours.rope.kind, ours.rope.theta) == (theirs.rope_parameters["rope_type"], theirs.rope_parameters["rope_theta"])
    assert ours.rope.factor == theirs.rope_parameters.get("factor", 1.0)
    assert ours.rope.original_max_position == theirs.rope_parameters.get("original_max_position_embeddings")
    assert list(ours.windows) == windows(theirs)


def windows(theirs: PretrainedConfig) -> list[int | None]:
    """What the attention layers of transformers use as their window."""
    if isinstance(theirs, LlamaConfig):
        return [None] * theirs.num_hidden_layers
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    return [theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds]
