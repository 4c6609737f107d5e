"""What config.json says of layers of unlike heads, against the config class of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from placement.checkpoint.header import read

REQUIRED = {"model_type": "mimo_v2_flash", "hidden_size": 64, "num_hidden_layers": 13, "num_attention_heads": 64}
SIZES = {"intermediate_size": 64, "vocab_size": 101}
KINDS = ["full_attention"] * 2 + ["sliding_attention"] * 11


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"layer_types": KINDS, "mlp_layer_types": ["sparse"] * 12 + ["dense"]},
        {"num_key_value_heads": 8, "v_head_dim": 64, "head_dim": 96, "attention_value_scale": None, "attention_bias": True},
        {"sliding_window": 64},
        {"sliding_window_size": 64},
        {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5},
        {"routed_scaling_factor": None, "norm_topk_prob": False, "moe_intermediate_size": 20},
    ],
    ids=lambda fields: "+".join(fields) or "silent",
)
def test_a_file_is_read_as_transformers_reads_it(fields: dict[str, Any], tmp_path: Path) -> None:
    sparse, saved = tmp_path / "sparse", tmp_path / "saved"
    sparse.mkdir()
    (sparse / "config.json").write_text(json.dumps({**REQUIRED, **SIZES, **fields}))
    theirs = AutoConfig.from_pretrained(sparse)
    theirs.save_pretrained(saved)
    ours = read(sparse)
    assert read(saved) == ours
    windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
    assert list(ours.windows) == windows
    assert (ours.num_kv_heads, ours.window_kv_heads) == (theirs.num_key_value_heads, 2 * theirs.num_key_value_heads)
    assert (ours.head_dim, ours.value_dim) == (theirs.head_dim, theirs.v_head_dim)
    assert ours.value_scale == (theirs.attention_value_scale or 1)
    assert (ours.qkv_bias, ours.o_bias, ours.tie_embeddings) == (theirs.attention_bias, False, theirs.tie_word_embeddings)
    assert (ours.max_position, ours.norm_eps, ours.bos_token_id) == (
        theirs.max_position_embeddings,
        theirs.rms_norm_eps,
        theirs.bos_token_id,
    )
    for rope, kind in ((ours.rope, "full_attention"), (ours.local_rope, "sliding_attention")):
        values = theirs.rope_parameters[kind]
        assert rope is not None
        assert (rope.kind, rope.theta) == (values["rope_type"], values["rope_theta"])
        assert rope.rotary_dims == int(theirs.head_dim * values["partial_rotary_factor"])
    moe = ours.moe
    assert moe is not None
    assert list(moe.layers) == [layer for layer, kind in enumerate(theirs.mlp_layer_types) if kind == "sparse"]
    assert (moe.num_experts, moe.top_k, moe.expert_size) == (
        theirs.n_routed_experts,
        theirs.num_experts_per_tok,
        theirs.moe_intermediate_size,
    )
    assert (moe.groups, moe.top_groups, moe.normalise) == (theirs.n_group, theirs.topk_group, theirs.norm_topk_prob)
    assert moe.routed_scaling == theirs.routed_scaling_factor
