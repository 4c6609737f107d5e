"""Layers of unlike heads (MiMo-V2): what config.json says of them, and who holds which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.checkpoint.header import read
from placement.cost.memory import kv_bytes_per_token, parameter_count, rank_memories
from placement.cost.step_shape import StepShape
from placement.explain.explain_text import as_text
from placement.explain.explanation import as_json, explain
from placement.layout.layout import Layout
from placement.layout.mesh import coords_of
from placement.legality.check import check
from placement.legality.dcp_sizes import legal_dcp
from placement.model.spec import ModelError, ModelSpec
from placement.ownership.handoff import Side, handoff
from placement.ownership.shards import parameters, shard, whole_model

PATTERN = [0, 1, 1, 1, 1, 0, *[1, 1, 1, 1, 1, 0] * 7]
PUBLISHED: dict[str, Any] = {
    "model_type": "mimo_v2_flash",
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "hybrid_layer_pattern": PATTERN,
    "moe_layer_freq": [0, *[1] * 47],
    "sliding_window": 128,
    "sliding_window_size": 128,
    "attention_chunk_size": 128,
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "attention_bias": False,
    "attention_value_scale": 0.707,
    "partial_rotary_factor": 0.334,
    "rope_theta": 5000000,
    "swa_rope_theta": 10000,
    "rope_scaling": None,
    "layernorm_epsilon": 1e-5,
    "max_position_embeddings": 262144,
    "vocab_size": 152576,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "n_routed_experts": 256,
    "n_shared_experts": None,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
}


def spec_of(folder: Path, **fields: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(PUBLISHED | fields))
    return read(folder)


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return spec_of(tmp_path)


def test_the_sizes_of_mimo_v2_flash(spec: ModelSpec) -> None:
    assert [layer for layer in range(48) if spec.windows[layer] is None] == [0, 5, 11, 17, 23, 29, 35, 41, 47]
    assert set(spec.windows) == {None, 129}, "128 tokens before a query, and itself"
    assert [(kind.num_kv_heads, kind.key_dim, kind.value_dim) for kind in spec.kinds] == [(4, 192, 128), (8, 192, 128)]
    assert (spec.num_heads, spec.value_scale, spec.norm_eps, spec.scores_scale) == (64, 0.707, 1e-5, 192**-0.5)
    assert spec.local_rope is not None
    assert [(rope.theta, rope.rotary_dims) for rope in (spec.rope, spec.local_rope)] == [(5e6, 64), (1e4, 64)]
    assert [spec.has_sinks(layer) for layer in (0, 1)] == [False, True]
    moe = spec.moe
    assert moe is not None
    assert (moe.num_experts, moe.top_k, moe.expert_size, moe.layers) == (256, 8, 2048, tuple(range(1, 48)))
    assert (moe.scoring, moe.choice_bias, moe.normalise, moe.routed_scaling, moe.shared_size) == ("sigmoid", True, True, 1.0, 0)
    assert parameter_count(spec) == pytest.approx(308.8e9, rel=1e-3), "309 billion, as published"


def test_a_token_takes_what_its_layers_keep(spec: ModelSpec) -> None:
    assert kv_bytes_per_token(spec, whole_model(spec)) == (9 * 4 + 39 * 8) * (192 + 128) * 2
    for text in ("tp=3", "tp=4,pp=4", "tp=16"):
        layout = Layout.parse(text)
        for memory in rank_memories(spec, layout):
            own = shard(spec, layout, coords_of(layout, memory.world_rank))
            heads = [len(own.heads[spec.windows[layer] is not None][1]) for layer in own.layers]
            assert memory.kv_bytes_per_token == sum(heads) * 320 * 2
    eight = shard(spec, Layout(tp=8), coords_of(Layout(tp=8), 1))
    assert eight.heads == ((range(8, 16), range(0, 1)), (range(8, 16), range(1, 2))), "kv 0 on two ranks, or on its own"


def test_shapes_of_a_layer_of_each_kind(spec: ModelSpec) -> None:
    layout = Layout(tp=8)
    found = {row.name: row for row in parameters(spec, shard(spec, layout, coords_of(layout, 1)))}
    for layer, kv_heads in ((0, 1), (1, 1)):
        assert found[f"layers.{layer}.attn.qkv.weight"].shape == (8 * 192 + kv_heads * 320, 4096)
        assert found[f"layers.{layer}.attn.o.weight"].shape == (4096, 8 * 128)
    takes = [[weight_slice.take for weight_slice in found[f"layers.{layer}.attn.qkv.weight"].slices] for layer in (0, 1)]
    queries = range(8 * 192, 16 * 192)
    assert takes == [[queries, range(192), range(128)], [queries, range(192, 384), range(128, 256)]]
    assert "layers.0.attn.sinks" not in found
    assert found["layers.1.attn.sinks"].slices[0].source == "model.layers.1.self_attn.attention_sink_bias"


def toy(num_kv_heads: int, window_kv_heads: int | None, num_heads: int = 24, **fields: Any) -> ModelSpec:
    values = {
        "family": "toy",
        "hidden_size": 64,
        "num_layers": 4,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "window_kv_heads": window_kv_heads,
        "head_dim": 12,
        "value_dim": 8,
        "intermediate_size": 96,
        "vocab_size": 200,
        "max_position": 100,
        "norm_eps": 1e-5,
        "windows": (None, 8, 8, None),
    }
    return ModelSpec.model_validate(values | fields)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([1, 2, 4, 6]), st.sampled_from([1, 3, 4, 8, 12]), st.integers(1, 12), st.data())
def test_every_head_of_either_kind_has_its_keys_beside_it(kv: int, window_kv: int, tp: int, data: Any) -> None:
    model = toy(kv, window_kv)
    shares = data.draw(st.none() | st.tuples(*[st.sampled_from([1.0, 1.5, 3.0])] * tp))
    layout = Layout(tp=tp, tp_shares=shares)
    owns = [shard(model, layout, coords_of(layout, rank)) for rank in range(tp)]
    for index, kind in enumerate(model.kinds):
        queries = [head for own in owns for head in own.heads[index][0]]
        assert queries == list(range(24))
        for own in owns:
            q_heads, kv_heads = own.heads[index]
            assert {head // kind.queries_per_kv for head in q_heads} == set(kv_heads)
    columns = [own.columns for own in owns]
    assert [column for own in columns for column in own] == list(range(96))


@pytest.mark.parametrize(
    ("kv", "window_kv", "tp", "legal"),
    [(1, 2, 4, [1, 2]), (2, 4, 4, [1]), (2, 4, 8, [1, 2]), (2, 4, 24, [1, 2, 3, 6]), (1, 3, 6, [1, 2]), (4, 2, 4, [1])],
)
def test_dcp_must_suit_both_kinds(kv: int, window_kv: int, tp: int, legal: list[int]) -> None:
    model = toy(kv, window_kv)
    assert legal_dcp(model, tp) == legal
    for dcp in range(1, tp + 1):
        if tp % dcp == 0:
            assert (check(Layout(tp=tp, dcp=dcp), model) == []) == (dcp in legal)


def test_the_kind_that_forbids_a_dcp_is_named() -> None:
    (broken,) = check(Layout(tp=4, dcp=2), toy(2, 4))
    assert "the 4 KV heads (swa_num_key_value_heads)" in broken.message
    assert broken.suggestions
    (broken,) = check(Layout(tp=4, dcp=2), toy(4, 2))
    assert "the 4 KV heads (num_key_value_heads)" in broken.message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"window_kv_heads": 5}, "num_heads=24 is not a multiple of window_kv_heads=5"),
        ({"windows": (None,) * 4}, "window_kv_heads=4 sets the layers with a window apart, but 0 of 4 layers have one"),
        ({"windows": (8,) * 4}, "but 4 of 4 layers have one"),
        ({"value_dim": 12}, "value_dim=12 is given, so it must be less than head_dim=12"),
        ({"qk_norm": "width"}, "together with latent attention or norms of queries and keys are not supported"),
    ],
)
def test_what_a_spec_refuses(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        toy(**{"num_kv_heads": 2, "window_kv_heads": 4, **fields})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"swa_head_dim": 128}, "swa_head_dim is 128, but only head_dim=192"),
        ({"swa_num_attention_heads": 32}, "swa_num_attention_heads is 32"),
        ({"swa_num_key_value_heads": 5}, "window_kv_heads is swa_num_key_value_heads"),
        ({"v_head_dim": 256, "swa_v_head_dim": 256}, "value_dim is v_head_dim"),
        ({"add_full_attention_sink_bias": True, "add_swa_attention_sink_bias": False}, "add_swa_attention_sink_bias is False"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax', but only sigmoid"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy', but only noaux_tc"),
        ({"moe_layer_freq": [0, 1]}, "moe_layer_freq is .*, but must say dense or sparse of each of the 48 layers"),
        ({"hybrid_layer_pattern": [0, 1]}, "layer_types names 2 layers"),
    ],
)
def test_what_a_file_may_not_say(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        spec_of(tmp_path, **fields)


def test_layers_of_one_sort_are_of_one_kind(tmp_path: Path) -> None:
    alike = spec_of(tmp_path, swa_num_key_value_heads=4)
    assert (len(alike.kinds), alike.num_kv_heads) == (1, 4)
    no_window, all_windows = (spec_of(tmp_path, hybrid_layer_pattern=[bit] * 48) for bit in (0, 1))
    assert [(len(found.kinds), found.num_kv_heads) for found in (no_window, all_windows)] == [(1, 4), (1, 8)]
    assert spec_of(tmp_path, add_full_attention_sink_bias=True).sinks == "all"
    assert spec_of(tmp_path, add_swa_attention_sink_bias=False).sinks == "none"
    assert spec_of(tmp_path, attention_value_scale=None).value_scale == 1


def test_explain_shows_both_kinds(spec: ModelSpec) -> None:
    found = explain(spec, Layout(tp=16, dcp=2, ep=16), StepShape.of(1, 1, 1000))
    text = as_text(found, "mimo")
    assert "q heads 4-7, kv 0" in text
    assert "window q heads 4-7, kv 0" in text
    assert "of 192, values of 128" in text
    assert "window attention: queries" in text
    rank = as_json(found, "mimo")["ranks"][15]
    assert (rank["q_heads"], rank["kv_heads"]) == ([60, 61, 62, 63], [3])
    assert (rank["window_q_heads"], rank["window_kv_heads"]) == ([60, 61, 62, 63], [7])


def test_a_handoff_is_refused(spec: ModelSpec) -> None:
    with pytest.raises(ModelError, match=r"not built yet .* 4 KV heads, keys of 192 and values of 128, window 8 KV heads"):
        handoff(spec, Side(Layout(tp=2)), Side(Layout(pp=2)), range(20))
