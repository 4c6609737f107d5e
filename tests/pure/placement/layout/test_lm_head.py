"""Where the LM head is: per DP rank or over the DP ranks of a stage, by rule, and what that costs."""

from __future__ import annotations

import pytest

from placement.cost.memory import rank_memories
from placement.cost.step_shape import StepShape
from placement.cost.traffic import rank_traffic
from placement.explain.explain_text import as_text
from placement.explain.explanation import explain
from placement.layout.layout import Layout
from placement.layout.lm_head import is_over_stage, spared_bytes
from placement.layout.mesh import coords_of, groups, talking_axes
from placement.legality.check import check
from placement.model.moe_spec import MoESpec
from placement.model.spec import ModelSpec
from placement.ownership.shards import shard


def model(vocab: int, hidden: int, **changes: object) -> ModelSpec:
    values: dict[str, object] = {
        "family": "llama",
        "hidden_size": hidden,
        "num_layers": 4,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 64,
        "intermediate_size": 512,
        "vocab_size": vocab,
        "max_position": 4096,
        "norm_eps": 1e-6,
        "windows": (None,) * 4,
        "moe": MoESpec(num_experts=128, top_k=8, expert_size=256, layers=(0, 1, 2, 3)),
    }
    return ModelSpec.model_validate(values | changes)


DEEPSEEK = model(129_280, 7168)
"""Vocabulary and hidden size of DeepSeek-V3, and of Qwen3-30B-A3B; layers of no matter."""
QWEN3 = model(151_936, 2048)


@pytest.mark.parametrize(
    ("spec", "dp_rank_bytes", "stage_bytes"), [(DEEPSEEK, 1_853_358_080, 232_128_512), (QWEN3, 622_329_856, 77_856_768)]
)
def test_bytes_of_the_head_on_a_rank(spec: ModelSpec, dp_rank_bytes: int, stage_bytes: int) -> None:
    """`stage_bytes` are those of a rank with most: rows are split in blocks of 64."""
    held = [
        [rank.weight_bytes for rank in rank_memories(spec, Layout.parse(f"attn_dp=8,ep=8,lm_head={over}"))]
        for over in ("dp_rank", "stage")
    ]
    differences = {dp_rank - stage for dp_rank, stage in zip(*held, strict=True)}
    assert max(differences) <= dp_rank_bytes - stage_bytes + 64 * spec.hidden_size * 2
    assert min(differences) == dp_rank_bytes - stage_bytes
    assert sum(held[0]) - sum(held[1]) == 7 * dp_rank_bytes


def test_a_step_says_one_gather_of_rows_and_eight_bytes_a_row() -> None:
    layout = Layout.parse("attn_dp=8,ep=8,lm_head=stage")
    said = [entry for entry in rank_traffic(DEEPSEEK, layout, 3, StepShape.of(512, 1, 1000, dp_size=8)) if entry.axis == "head"]
    assert [(entry.where, entry.group_size, entry.payload_bytes, entry.wire_bytes_per_rank) for entry in said] == [
        ("head rows", 8, 64 * 7168 * 2, 7 * 64 * 7168 * 2),
        ("sampling", 8, 8 * 512, 7 * 8 * 512),
    ]
    alone = rank_traffic(DEEPSEEK, Layout.parse("attn_dp=8,ep=8,lm_head=dp_rank"), 3, StepShape.of(512, 1, 1000, dp_size=8))
    assert not [entry for entry in alone if entry.where in ("head rows", "sampling")]


def test_the_rule() -> None:
    layout = Layout.parse("attn_dp=8,ep=8")
    assert is_over_stage(DEEPSEEK, layout)
    assert is_over_stage(QWEN3, layout)
    assert not is_over_stage(DEEPSEEK, Layout.parse("tp=8,ep=8")), "one DP rank"
    assert not is_over_stage(DEEPSEEK.model_copy(update={"moe": None}), layout), "DP ranks that need not meet"
    assert not is_over_stage(DEEPSEEK.model_copy(update={"tie_embeddings": True}), layout), "the head is the embedding"
    small = model(32_000, 1024)
    assert spared_bytes(small, layout) < 64 * 2**20
    assert not is_over_stage(small, layout)
    assert is_over_stage(small, Layout.parse("attn_dp=8,ep=8,lm_head=stage")), "asked for"
    assert not is_over_stage(DEEPSEEK, Layout.parse("attn_dp=8,ep=8,lm_head=dp_rank"))


@pytest.mark.parametrize(
    ("text", "changes", "why"),
    [
        ("tp=2,lm_head=stage", {}, "attn_dp=1"),
        ("tp=2,lm_head=dp_rank", {}, "attn_dp=1"),
        ("attn_dp=2,lm_head=stage", {"tie_embeddings": True}, "tie_word_embeddings"),
        ("attn_dp=4,tp=2,lm_head=stage", {"vocab_size": 7}, "8 ranks (attn_dp=4 x tp=2) are more than the 7 vocabulary rows"),
    ],
)
def test_a_head_that_cannot_be_sharded_is_refused_with_what_would_work(text: str, changes: dict[str, object], why: str) -> None:
    spec = model(100, 64, **changes)
    [broken] = check(Layout.parse(text), spec)
    assert broken.field == "lm_head"
    assert why in broken.message
    assert broken.suggestions
    assert all(check(Layout.parse(each), spec) == [] for each in broken.suggestions)


def test_another_mistake_keeps_the_head_where_it_was_asked_for() -> None:
    [broken] = check(Layout.parse("attn_dp=2,tp=2,ep=3,lm_head=stage"), model(100, 64))
    assert all("lm_head=stage" in each for each in broken.suggestions)


def test_every_vocabulary_row_is_in_one_head_of_a_stage() -> None:
    spec, layout = model(1000, 64), Layout.parse("attn_dp=2,cp=2,tp=3,pp=2,tp_shares=2/1/1,lm_head=stage")
    owns = [shard(spec, layout, coords_of(layout, rank)) for rank in range(layout.world)]
    assert talking_axes(spec, layout)[-1] == "head"
    for group in groups(layout, "head"):
        rows = [row for rank in group for row in owns[rank].head_vocab]
        assert rows == list(range(len(rows)))
        assert len(rows) >= 1000
    text = as_text(explain(spec, layout, StepShape.of(4, 1, dp_size=2)), "m")
    assert "[0 1 2 6 7 8] [3 4 5 9 10 11]" in text
    assert "no head" in text
    assert "one LM head for all DP ranks, over 6 ranks, each of which is spared 20.8 KiB" in text


def test_tied_embeddings_on_other_stages_are_split() -> None:
    spec, layout = model(1000, 64, tie_embeddings=True), Layout.parse("attn_dp=2,pp=2,lm_head=stage")
    assert check(layout, spec) == []
    first, last = (shard(spec, layout, coords_of(layout, rank)) for rank in (0, 2))
    assert len(first.vocab) >= 1000
    assert len(last.head_vocab) == pytest.approx(500, abs=64)


def test_the_former_name_of_a_head_per_dp_rank_is_read() -> None:
    layout = Layout.parse("attn_dp=8,ep=8,lm_head=lane")
    assert layout == Layout.parse("attn_dp=8,ep=8,lm_head=dp_rank")
    assert "lm_head=dp_rank" in str(layout)
