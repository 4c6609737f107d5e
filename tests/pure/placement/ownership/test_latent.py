"""Latent attention, placed: its sizes from config.json, who holds what, what the cache takes, and which form is cheaper."""

from __future__ import annotations

import json
from math import log
from pathlib import Path
from typing import Any

import pytest

from placement.checkpoint.header import read
from placement.cost.balance import balance
from placement.cost.memory import kv_bytes_per_token, parameter_count, rank_memories
from placement.cost.step_shape import StepShape
from placement.explain.explain_text import as_text
from placement.explain.explanation import explain
from placement.layout.layout import Layout
from placement.layout.mesh import coords_of
from placement.legality.check import check
from placement.legality.dcp_sizes import legal_dcp
from placement.model.mla_spec import MLASpec
from placement.model.spec import ModelError, ModelSpec
from placement.ownership.shards import parameters, shard

V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "first_k_dense_replace": 61,
    "num_experts_per_tok": 8,
    "torch_dtype": "bfloat16",
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
SIZES = MLASpec(q_lora_rank=1536, kv_lora_rank=512, nope_dim=128, rope_dim=64, value_dim=128)


def spec_of(folder: Path, drop: tuple[str, ...] = (), **changes: Any) -> ModelSpec:
    config = {name: value for name, value in {**V3, **changes}.items() if name not in drop}
    (folder / "config.json").write_text(json.dumps(config))
    return read(folder)


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return spec_of(tmp_path)


def test_the_sizes_of_deepseek_v3(spec: ModelSpec) -> None:
    assert spec.mla == SIZES
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.kv_planes, spec.kv_dim) == (128, 1, 192, 1, 576)
    assert spec.rope.interleaved
    assert spec.scores_scale == pytest.approx(192**-0.5 * (1 + 0.1 * log(40)) ** 2)


def test_where_the_file_is_silent(tmp_path: Path) -> None:
    sizes = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    for family in ("deepseek_v2", "deepseek_v3"):
        assert spec_of(tmp_path, sizes, model_type=family).mla == SIZES
    assert spec_of(tmp_path, ("rope_scaling",)).scores_scale == 192**-0.5
    lite = spec_of(tmp_path, model_type="deepseek_v2", q_lora_rank=None, head_dim=64, rope_interleave=False)
    assert lite.mla is not None
    assert lite.mla.q_lora_rank is None
    assert lite.rope.interleaved, "V2 knows no other way"
    assert not spec_of(tmp_path, rope_interleave=False).rope.interleaved


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ({"v_head_dim": 256}, "value_dim=256"),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ({"qk_rope_head_dim": 63}, "is odd"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        spec_of(tmp_path, **changes)


@pytest.mark.parametrize("tp", [1, 2, 3, 7, 8, 16])
def test_a_token_of_deepseek_v3_takes_70272_bytes_whatever_tp_is(spec: ModelSpec, tp: int) -> None:
    layout = Layout(tp=tp)
    found = {kv_bytes_per_token(spec, shard(spec, layout, coords_of(layout, rank))) for rank in range(tp)}
    assert found == {576 * 2 * 61} == {70_272}


def test_dcp_removes_the_copies(spec: ModelSpec) -> None:
    """The same memory for the cache holds eight times the tokens."""
    copies, shares = (rank_memories(spec, Layout(tp=8, dcp=dcp)) for dcp in (1, 8))
    assert {rank.tokens_in(2**30) for rank in shares} == {8 * rank.tokens_in(2**30) for rank in copies}


@pytest.mark.parametrize("tp", [1, 2, 4, 6, 12, 16])
def test_dcp_is_any_divisor_of_tp(spec: ModelSpec, tp: int) -> None:
    assert legal_dcp(spec, tp) == [size for size in range(1, tp + 1) if tp % size == 0]


def test_a_dcp_that_does_not_divide_is_refused(spec: ModelSpec) -> None:
    [violation] = check(Layout(tp=6, dcp=4), spec)
    assert "all 6 tp ranks hold the same latents" in violation.message
    assert "with tp=6 dcp can be 1-3, 6" in violation.message
    assert all(check(Layout.parse(text), spec) == [] for text in violation.suggestions)


@pytest.mark.parametrize("tp", [1, 3, 8])
@pytest.mark.parametrize("q_lora_rank", [None, 1536])
def test_heads_are_split_and_latents_are_whole(tmp_path: Path, q_lora_rank: int | None, tp: int) -> None:
    """Every row of a split matrix is on one rank, every row of the others on all; any split of heads is legal."""
    spec, layout = spec_of(tmp_path, q_lora_rank=q_lora_rank, num_hidden_layers=1, first_k_dense_replace=1), Layout(tp=tp)
    assert check(layout, spec) == []
    held: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for rank in range(tp):
        for row in parameters(spec, shard(spec, layout, coords_of(layout, rank))):
            for weight_slice in row.slices:
                if ".self_attn." in weight_slice.source:
                    name = weight_slice.source.split(".")[4]
                    held.setdefault(name, []).extend(weight_slice.take)
                    sizes[name] = weight_slice.source_shape[weight_slice.dim]
    split = {"q_proj" if q_lora_rank is None else "q_b_proj", "kv_b_proj", "o_proj"}
    copies = {"kv_a_proj_with_mqa", "kv_a_layernorm", *(() if q_lora_rank is None else ("q_a_proj", "q_a_layernorm"))}
    assert held.keys() == split | copies
    for name, rows in held.items():
        assert sorted(rows) == sorted(list(range(sizes[name])) * (1 if name in split else tp)), name


def test_biases_of_a_fused_first_projection_land_behind_the_queries(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, q_lora_rank=None, attention_bias=True, num_hidden_layers=1, first_k_dense_replace=1)
    layout = Layout(tp=3)
    own = shard(spec, layout, coords_of(layout, 1))
    [bias] = [row for row in parameters(spec, own) if row.name == "layers.0.attn.qkv_a.bias"]
    [weight_slice] = bias.slices
    assert bias.shape == (len(own.q_heads) * 192 + 576,)
    assert (weight_slice.source, weight_slice.at, len(weight_slice.take)) == (
        "model.layers.0.self_attn.kv_a_proj_with_mqa.bias",
        len(own.q_heads) * 192,
        576,
    )


def test_the_weights_add_up(spec: ModelSpec) -> None:
    """Attention of one layer of V3 by hand, and the columns of the MLP level out what heads leave uneven."""
    attention = 7168 * (1536 + 576) + 1536 + 512 + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    whole = attention + 3 * 7168 * 18432 + 2 * 7168
    assert parameter_count(spec) == 61 * whole + 7168 + 2 * 129280 * 7168
    assert balance(spec, Layout(tp=6)).mean_over_max > 0.99


def test_explain_shows_the_copies_and_what_ends_them(spec: ModelSpec) -> None:
    step = StepShape.of(1, 1, context=999)
    text = as_text(explain(spec, Layout(tp=8, dcp=2), step), "v3")
    assert "KV 70,272 B a token" in text
    assert "q heads 0-15, latents of 576 values a token" in text
    assert "4 ranks of a tp group keep the same latents; with dcp=8 each would keep a share of its own" in text
    # 16 heads of 576 and of 512 + 2 values of two bytes: queries there, and parts of both ranks' heads back
    assert "all_gather over 2 dcp ranks: 18,432 B" in text
    assert "all_to_all over 2 dcp ranks: 32,896 B" in text
    assert "keep the same" not in as_text(explain(spec, Layout(tp=8, dcp=8), step), "v3")


def test_the_crossover_of_deepseek_v3_is_171_query_tokens() -> None:
    assert SIZES.crossover == 171
    assert SIZES.absorbs_row(170, 10**6)
    assert not SIZES.absorbs_row(171, 10**6)
    assert SIZES.absorbs_row(1, 1), "a decode step"
    assert not SIZES.absorbs_row(2, 0), "a first chunk has nothing to make but what it brings"


@pytest.mark.parametrize(
    "sizes",
    [
        SIZES,
        MLASpec(kv_lora_rank=16, nope_dim=8, rope_dim=4, value_dim=6),
        MLASpec(kv_lora_rank=16, nope_dim=20, rope_dim=4, value_dim=14),
    ],
)
def test_the_rule_takes_the_form_with_fewer_multiplications(sizes: MLASpec) -> None:
    rank, query, value = sizes.kv_lora_rank, sizes.query_dim, sizes.value_dim
    for new in (1, 2, 5, 16, 17, 100, 170, 171, 400):
        for cached in (0, 1, 7, 50, 171, 3000):
            pairs = sum(cached + position + 1 for position in range(new))
            naive = (cached + new) * rank * (sizes.nope_dim + value) + pairs * (query + value)
            absorbed = new * rank * (sizes.nope_dim + value) + pairs * (rank + sizes.rope_dim + rank)
            assert sizes.absorbs_row(new, cached) == (absorbed < naive)


def test_where_a_latent_is_no_longer_than_keys_and_values_absorbing_never_loses() -> None:
    sizes = MLASpec(kv_lora_rank=16, nope_dim=20, rope_dim=4, value_dim=14)
    assert sizes.crossover is None
    assert all(sizes.absorbs_row(new, cached) for new in (1, 50, 1000) for cached in (0, 1, 1000))
