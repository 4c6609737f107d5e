"""What config.json says of experts, against the config classes of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from placement.checkpoint.header import read
from placement.model.spec import ModelError, ModelSpec

REQUIRED = {"hidden_size": 4096, "num_hidden_layers": 6, "num_attention_heads": 32, "intermediate_size": 64, "vocab_size": 101}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "mixtral": {"own": {"num_local_experts": 16, "num_experts_per_tok": 3, "sliding_window": 64}},
    "qwen2_moe": {
        "own": {"num_experts": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True, "qkv_bias": False},
        "windows": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3},
    },
    "qwen3_moe": {
        "own": {"num_experts": 8, "decoder_sparse_step": 3, "attention_bias": True, "head_dim": 64},
        "windows": {"use_sliding_window": True, "sliding_window": 16},
    },
    "gpt_oss": {
        "own": {"num_local_experts": 8, "swiglu_limit": 5.0, "swiglu_alpha": 1.5, "sliding_window": 32},
        "kinds": {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 4},
    },
    "glm4_moe": {
        "own": {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 3,
                "routed_scaling_factor": 2.5, "norm_topk_prob": False, "use_qk_norm": True, "num_nextn_predict_layers": 0},
    },
}  # fmt: skip
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def both(folder: Path, family: str, **fields: Any) -> tuple[ModelSpec, Any]:
    """Our reading of a sparse file, which is our reading of the full one too, and theirs."""
    sparse, saved = folder / "sparse", folder / "saved"
    sparse.mkdir()
    (sparse / "config.json").write_text(json.dumps({"model_type": family, **REQUIRED, **fields}))
    theirs = AutoConfig.from_pretrained(sparse)
    theirs.save_pretrained(saved)
    ours = read(sparse)
    assert read(saved) == ours
    return ours, theirs


@pytest.mark.parametrize(("family", "case"), [(family, case) for family, cases in CASES.items() for case in ("silent", *cases)])
def test_experts_are_read_as_transformers_reads_them(family: str, case: str, tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, family, **CASES[family].get(case, {}))
    moe, values = ours.moe, theirs.to_dict()
    assert moe.num_experts == next(values[name] for name in EXPERTS if name in values)
    assert moe.top_k == theirs.num_experts_per_tok
    assert moe.expert_size == values.get("moe_intermediate_size", theirs.intermediate_size)
    first, step = values.get("first_k_dense_replace", 0), values.get("decoder_sparse_step", 1)
    dense = values.get("mlp_only_layers") or []
    assert moe.layers == tuple(at for at in range(first, 6) if (at + 1) % step == 0 and at not in dense)
    assert (moe.groups, moe.top_groups) == (values.get("n_group", 1), values.get("topk_group", 1))
    assert moe.routed_scaling == values.get("routed_scaling_factor", 1.0)
    assert moe.normalise == values.get("norm_topk_prob", True)
    shared = values.get("n_shared_experts", 0) * moe.expert_size
    assert moe.shared_size == values.get("shared_expert_intermediate_size", shared)
    assert (moe.swiglu_limit, moe.swiglu_alpha) == (values.get("swiglu_limit"), values.get("swiglu_alpha", 1.702))
    assert ours.qkv_bias == values.get("qkv_bias", values.get("attention_bias", False))
    assert ours.mtp_layers == values.get("num_nextn_predict_layers", values.get("num_mtp_layers", 0))
    assert (ours.max_position, ours.norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    assert (ours.num_kv_heads, ours.bos_token_id) == (theirs.num_key_value_heads, theirs.bos_token_id)
    ropes = theirs.rope_parameters
    assert (ours.rope.kind, ours.rope.theta) == (ropes["rope_type"], ropes["rope_theta"])
    assert (ours.rope.factor, ours.rope.truncate) == (ropes.get("factor", 1.0), ropes.get("truncate", True))
    assert (ours.rope.rotary_dims or ours.head_dim) == int(ours.head_dim * ropes.get("partial_rotary_factor", 1.0))
    assert list(ours.windows) == windows(theirs)


def windows(theirs: Any) -> list[int | None]:
    """What the attention of transformers uses: one window for all layers, or by kind."""
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    return [getattr(theirs, "sliding_window", None) if kind == "sliding_attention" else None for kind in kinds]


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        (
            "qwen3_moe",
            {"num_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok is top_k|top_k is num_experts_per_tok",
        ),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("glm4_moe", {"n_group": 3, "n_routed_experts": 8}, "groups is n_group"),
        ("gpt_oss", {"swiglu_limit": -1.0}, "swiglu_limit is -1.0"),
    ],
)
def test_numbers_that_clash_are_named_as_the_file_names_them(
    family: str, fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **REQUIRED, **fields}))
    with pytest.raises(ModelError, match=words):
        read(tmp_path)


def test_no_experts_are_a_dense_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **REQUIRED, "num_experts": 0}))
    assert read(tmp_path).moe is None
