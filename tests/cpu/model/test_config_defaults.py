"""Fields that config.json leaves out have the defaults of the config class in transformers, in a nested text_config too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from placement.checkpoint.header import read
from placement.checkpoint.hf.families import FAMILIES, TEXT_FAMILY
from placement.model.spec import ModelSpec

CONFIGS = pytest.importorskip("transformers").CONFIG_MAPPING

UNUSUAL: dict[str, Any] = {
    "hidden_size": 5120,
    "intermediate_size": 1504,
    "num_hidden_layers": 9,
    "num_attention_heads": 128,
    "num_key_value_heads": 1,
    "head_dim": 40,
    "vocab_size": 999,
    "max_position_embeddings": 777,
    "rms_norm_eps": 3e-5,
    "attention_bias": True,
    "bos_token_id": 7,
    "eos_token_id": 8,
    "tie_word_embeddings": True,
    "rope_theta": 7e4,
    "sliding_window": 33,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 160,
}
"""No value is a default of any family, but for truth values."""

OTHER: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "max_window_layers": 5},
    "qwen2_moe": {"qkv_bias": False, "num_experts": 24, "shared_expert_intermediate_size": 96, "norm_topk_prob": True},
    "qwen3_moe": {"use_sliding_window": True, "num_experts": 24, "decoder_sparse_step": 2, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 6},
    "gpt_oss": {"num_local_experts": 24},
    "glm4_moe": {"n_routed_experts": 24, "n_shared_experts": 2, "first_k_dense_replace": 3, "use_qk_norm": True},
    "mimo_v2_flash": {"n_routed_experts": 24, "head_dim": 144, "v_head_dim": 24, "attention_value_scale": 0.5},
    "deepseek_v2": {"n_routed_experts": 24, "q_lora_rank": 40, "kv_lora_rank": 48, "qk_rope_head_dim": 8, "v_head_dim": 24},
    "deepseek_v3": {"n_routed_experts": 24, "q_lora_rank": 40, "n_group": 4, "topk_group": 2},
    "smollm3": {"tie_word_embeddings": False, "no_rope_layer_interval": 3},
    "phi3": {"original_max_position_embeddings": 555, "partial_rotary_factor": 0.5},
    "glm": {"attention_bias": False, "partial_rotary_factor": 0.25},
    "glm4": {"attention_bias": False, "partial_rotary_factor": 0.25},
    "gemma2": {"tie_word_embeddings": False, "query_pre_attn_scalar": 100, "final_logit_softcapping": 9.0},
    "gemma3_text": {"tie_word_embeddings": False, "query_pre_attn_scalar": 100, "rope_local_base_freq": 3e3},
}
"""Fields that only these families have."""

REQUIRED = {"deepseek_v2": {"num_experts_per_tok": 3}, "glm4_moe": {"head_dim": 128}}
"""What a family's config class has no usable default for."""


def unusual(family: str) -> dict[str, Any]:
    fields = {"model_type": family, **UNUSUAL, **OTHER.get(family, {})}
    if FAMILIES[family].mla:
        del fields["num_key_value_heads"], fields["head_dim"]
        fields["num_attention_heads"] = 64
    if family == "mimo_v2_flash":
        del fields["rope_theta"]  # transformers reads no theta there
    return fields


def read_fields(folder: Path, fields: dict[str, Any]) -> ModelSpec:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return read(folder)


def read_whole(folder: Path, fields: dict[str, Any]) -> ModelSpec:
    """The spec of the same model in a file with every field, as the config class fills them in."""
    whole = CONFIGS[fields["model_type"]](**{name: value for name, value in fields.items() if name != "model_type"}).to_dict()
    if FAMILIES[fields["model_type"]].mla:
        del whole["num_key_value_heads"]  # not used there, and not adjusted to num_attention_heads
    return read_fields(folder, whole)


CASES = [
    (family, absent)
    for family in FAMILIES
    for absent in unusual(family)
    if absent not in ("model_type", *REQUIRED.get(family, {}))
]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_of_nothing_but_its_model_type(tmp_path: Path, family: str) -> None:
    fields = {"model_type": family, **REQUIRED.get(family, {})}
    assert read_fields(tmp_path / "sparse", fields) == read_whole(tmp_path / "whole", fields)


@pytest.mark.parametrize(("family", "absent"), CASES)
def test_each_absent_field_has_the_default_of_its_class(tmp_path: Path, family: str, absent: str) -> None:
    fields = unusual(family)
    del fields[absent]
    assert read_fields(tmp_path / "sparse", fields) == read_whole(tmp_path / "whole", fields)


@pytest.mark.parametrize("outer", TEXT_FAMILY)
def test_a_sparse_text_config_has_the_defaults_of_its_class(tmp_path: Path, outer: str) -> None:
    """With and without a model type of its own."""
    text = {"num_hidden_layers": 3, "vocab_size": 77, "rms_norm_eps": 3e-5}
    theirs = CONFIGS[outer](text_config=dict(text)).text_config
    nested = {"model_type": theirs.model_type, **text}
    whole = read_whole(tmp_path / "whole", nested)
    assert theirs.model_type == TEXT_FAMILY[outer]
    for name, inner in (("typed", nested), ("untyped", text)):
        assert read_fields(tmp_path / name, {"model_type": outer, "text_config": inner}) == whole


def test_every_multimodal_family_with_a_known_decoder_is_listed() -> None:
    found = {}
    for outer in CONFIGS:
        parts = getattr(CONFIGS[outer], "sub_configs", {})
        kind = getattr(parts.get("text_config"), "model_type", None)
        if kind in FAMILIES:
            found[outer] = kind
    assert found.items() <= TEXT_FAMILY.items()
