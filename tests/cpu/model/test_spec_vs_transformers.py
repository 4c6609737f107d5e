"""Our reading of config.json against the config classes of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import (
    AutoConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GlmConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from placement.checkpoint.header import read
from placement.model.spec import RopeSpec

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

NEWER: dict[type[PretrainedConfig], dict[str, dict[str, object]]] = {
    SmolLM3Config: {"own": {"no_rope_layers": [1, 0, 0, 1, 1, 0], "attention_bias": True, "mlp_bias": True}},
    Olmo2Config: {"own": {"attention_bias": True, "num_key_value_heads": 8}},
    Phi3Config: {
        "own": {"sliding_window": 64, "partial_rotary_factor": 0.5, "num_key_value_heads": 8},
        "longrope": {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64},
               "max_position_embeddings": 131072},
    },
    GlmConfig: {"own": {"attention_bias": False, "partial_rotary_factor": 0.25}},
    Glm4Config: {"own": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.25}}},
    Gemma2Config: {
        "own": {"attn_logit_softcapping": None, "final_logit_softcapping": 7.0, "query_pre_attn_scalar": 144, "head_dim": 128},
        "kinds": {"layer_types": ["full_attention"] * 5 + ["sliding_attention"], "sliding_window": 9},
    },
    Gemma3TextConfig: {
        "own": {"sliding_window_pattern": 3, "rope_local_base_freq": 5e3, "rope_theta": 2e6,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        "new": {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 3e6},
                                    "sliding_attention": {"rope_type": "default", "rope_theta": 7e3}}},
    },
}  # fmt: skip
"""Beside the silent file, what only these families have."""


@pytest.mark.parametrize(
    ("family", "case"),
    [(family, case) for family, cases in NEWER.items() for case in ("silent", *cases)],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
def test_the_newer_families_are_read_as_transformers_reads_them(
    tmp_path: Path, family: type[PretrainedConfig], case: str
) -> None:
    sparse, saved = tmp_path / "sparse", tmp_path / "saved"
    sparse.mkdir()
    own = NEWER[family].get(case, {})
    (sparse / "config.json").write_text(json.dumps({"model_type": family.model_type, **REQUIRED, **own}))
    theirs = AutoConfig.from_pretrained(sparse)
    theirs.save_pretrained(saved)

    ours = read(sparse)
    assert read(saved) == ours
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert (ours.max_position, ours.norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    assert (ours.bos_token_id, ours.tie_embeddings) == (theirs.bos_token_id, theirs.tie_word_embeddings)
    eos = theirs.eos_token_id
    assert list(ours.eos_token_ids) == (eos if isinstance(eos, list) else [eos])
    assert ours.attention_softcap == getattr(theirs, "attn_logit_softcapping", None)
    assert ours.logit_softcap == getattr(theirs, "final_logit_softcapping", None)
    scalar = getattr(theirs, "query_pre_attn_scalar", ours.head_dim)
    assert ours.scores_scale == pytest.approx(scalar**-0.5)
    assert ours.unrotated_layers == tuple(
        layer for layer, rotated in enumerate(getattr(theirs, "no_rope_layers", [1] * 6)) if not rotated
    )
    assert list(ours.windows) == kinds_of_windows(theirs)
    ropes = theirs.rope_parameters
    for spec, parameters in (
        (ours.rope, ropes.get("full_attention", ropes)),
        (ours.local_rope, ropes.get("sliding_attention")),
    ):
        assert (spec is None) == (parameters is None)
        if spec is not None:
            check_rope(spec, parameters, ours.head_dim)


def check_rope(ours: RopeSpec, theirs: dict[str, object], head_dim: int) -> None:
    assert (ours.kind, ours.theta) == (theirs["rope_type"], theirs["rope_theta"])
    assert (ours.rotary_dims or head_dim) == int(head_dim * theirs.get("partial_rotary_factor", 1.0))
    assert list(ours.long_factor) == theirs.get("long_factor", [])
    if ours.kind == "linear":
        assert ours.factor == theirs["factor"]
    if ours.kind == "longrope":
        assert (ours.original_max_position, ours.factor) == (theirs["original_max_position_embeddings"], 131072 / 4096)


def kinds_of_windows(theirs: PretrainedConfig) -> list[int | None]:
    window = getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", None)
    if kinds is None:
        return [window] * theirs.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


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
    stretched = 4 if case == "yarn" else 1  # the trained length is then the stated one
    assert (ours.max_position, ours.norm_eps) == (stretched * theirs.max_position_embeddings, theirs.rms_norm_eps)
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
