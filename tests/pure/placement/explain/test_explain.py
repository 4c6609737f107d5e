"""What a layout means, in numbers: those of the literature, and the contract of ``explain --json``."""

from __future__ import annotations

from math import prod

import pytest

from placement.cost.balance import balance, bubble, weights_read
from placement.cost.step_shape import StepShape
from placement.explain.explain_text import as_text
from placement.explain.explanation import Explanation, as_json, explain
from placement.layout.layout import Layout
from placement.layout.mesh import coords_of
from placement.legality.check import check
from placement.model.spec import ModelSpec, RopeSpec
from placement.ownership.shards import shard

MIB = 1 << 20


def model(**changes: object) -> ModelSpec:
    """64 heads of 128, hidden size 8192, MLP 4 x 8192."""
    values: dict[str, object] = {
        "family": "llama",
        "hidden_size": 8192,
        "num_layers": 4,
        "num_heads": 64,
        "num_kv_heads": 64,
        "head_dim": 128,
        "intermediate_size": 32768,
        "vocab_size": 32000,
        "max_position": 4096,
        "norm_eps": 1e-5,
    }
    values |= changes
    return ModelSpec(**{"windows": (None,) * int(str(values["num_layers"])), **values})


def explained(text: str, step: StepShape | None = None, **changes: object) -> Explanation:
    spec, layout = model(**changes), Layout.parse(text)
    assert check(layout, spec) == []
    return explain(spec, layout, step or StepShape.of(1, 1))


# Values from the literature


def test_the_slices_of_a_layer_on_four_ranks() -> None:
    """The published layer has two MLP matrices; ours is gated and has three, so its numbers are those without the gate."""
    for layer in as_json(explained("tp=4"), "m")["layer"]:
        slices = {
            weight_slice["source"].split(".")[-2]: weight_slice["shape"]
            for row in layer["parameters"]
            if "norm" not in row["name"]
            for weight_slice in row["slices"]
        }
        # Stored [outputs, inputs]: the transpose of the [8192, 2048] in the literature.
        assert [slices[f"{name}_proj"] for name in "qkv"] == [(2048, 8192)] * 3
        assert slices["o_proj"] == (8192, 2048)
        sizes = {name: 2 * prod(shape) for name, shape in slices.items()}
        assert sizes["q_proj"] == 32 * MIB
        assert sizes["up_proj"] == sizes["down_proj"] == sizes["gate_proj"] == 128 * MIB
        assert sum(size for name, size in sizes.items() if name != "gate_proj") == 384 * MIB
        assert layer["bytes"] == (384 + 128) * MIB + 2 * 2 * 8192  # the gate, and two norms


def test_sixty_four_heads_in_eight_kv_groups() -> None:
    eight, sixteen = (explained(text, num_kv_heads=8).ranks for text in ("tp=8", "tp=16"))
    assert {(len(view.own.q_heads), len(view.own.kv_heads)) for view in eight} == {(8, 1)}
    holders = [view.own.kv_heads.start for view in sixteen]
    assert holders == sorted([*range(8)] * 2)
    per_token = [sum(view.memory.kv_bytes_per_token for view in views) for views in (eight, sixteen)]
    assert per_token[1] == 2 * per_token[0] == 2 * (2 * 4 * 8 * 128 * 2)


@pytest.mark.parametrize(("stages", "micro_batches", "idle"), [(2, 1, 0.5), (2, 4, 0.2), (2, 16, 0.059), (4, 32, 0.086)])
def test_the_bubble_of_a_pipeline(stages: int, micro_batches: int, idle: float) -> None:
    assert bubble(stages, micro_batches) == pytest.approx(idle, abs=0.0005)
    assert as_json(explained(f"pp={stages}"), "m")["bubble"].get(str(micro_batches)) == bubble(stages, micro_batches)


def test_one_stage_has_no_bubble() -> None:
    assert bubble(1, 1) == 0
    assert as_json(explained("tp=2"), "m")["bubble"] == {}


# Balance


def test_balance_counts_the_weights_a_step_reads() -> None:
    spec = model(tie_embeddings=True)
    own = shard(spec, Layout(), coords_of(Layout(), 0))
    layer = 4 * 8192 * 8192 + 3 * 8192 * 32768 + 2 * 8192
    assert weights_read(spec, own) == 4 * layer + 8192 + 32000 * 8192  # the tied embedding is read once: as the head
    staged = [weights_read(spec, shard(spec, Layout(pp=2), coords_of(Layout(pp=2), rank))) for rank in range(2)]
    assert staged == [2 * layer, 2 * layer + 8192 + 32000 * 8192]
    assert balance(spec, Layout(pp=2)).mean_over_max == pytest.approx(sum(staged) / 2 / max(staged))


def test_an_even_split_is_balanced_and_shares_are_judged_by_their_devices() -> None:
    assert balance(model(), Layout(tp=4)).mean_over_max == pytest.approx(1)
    found = balance(model(), Layout(tp=2, tp_shares=(3, 1)))
    assert found.mean_over_max == pytest.approx(1 / 1.5, rel=1e-3)
    assert found.for_shares == pytest.approx(1, rel=1e-3)
    uneven = balance(model(), Layout(tp=3))
    assert uneven.for_shares == uneven.mean_over_max < 1


# The report


def test_memory_is_weights_and_whole_blocks() -> None:
    found = as_json(explained("tp=2,pp=2", StepShape.of(3, 1, context=20)), "m")
    memory, ranks = found["memory"], found["ranks"]
    for rank, needs in zip(ranks, memory["ranks"], strict=True):
        assert needs["kv_bytes"] == 3 * 32 * rank["kv_bytes_per_token"]
        assert needs["activation_bytes"] > 0
        assert needs["total_bytes"] == needs["kv_bytes"] + rank["weight_bytes"] + needs["activation_bytes"]
    assert memory["total_bytes"] == sum(needs["total_bytes"] for needs in memory["ranks"])


@pytest.mark.parametrize("text", ["tp=1", "tp=3,pp=2", "tp=2,tp_shares=3/1", "tp=16,pp=4,replicas=2"])
def test_the_json_of_a_layout(text: str) -> None:
    found = as_json(explained(text), "m")
    layout = Layout.parse(text)
    assert [rank["world_rank"] for rank in found["ranks"]] == list(range(layout.world))
    wanted = {"world_rank", "coords", "layers", "q_heads", "kv_heads", "experts", "weight_bytes", "kv_bytes_per_token"}
    assert all(wanted <= rank.keys() for rank in found["ranks"])
    columns = {"where", "op", "axis", "group_size", "calls", "payload_bytes", "wire_bytes_per_rank"}
    assert all(columns <= entry.keys() and entry["ranks"] for entry in found["traffic"])
    for axis, groups in found["groups"].items():
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
        assert {len(group) for group in groups} == {getattr(layout, axis)}
    stage = [rank for rank in found["ranks"] if rank["coords"]["pp"] == 0]
    assert [head for rank in stage for head in rank["q_heads"]] == list(range(64))


@pytest.mark.parametrize("text", ["tp=1", "tp=3,pp=2", "tp=16"])
def test_the_report_draws_every_rank_and_the_layer_with_real_numbers(text: str) -> None:
    found = explained(text, StepShape.of(32, 2000))
    report = as_text(found, "big")
    assert max(map(len, report.splitlines())) <= 128
    assert all(f"rank {rank} " in report for rank in range(found.layout.world))
    assert "hidden [64,000 tokens, 8,192]" in report
    rows = sum(len(heads) for heads in (found.ranks[0].own.q_heads, found.ranks[0].own.kv_heads, found.ranks[0].own.kv_heads))
    assert f"[{rows * 128:,}, 8,192]" in report
    for entry, _ in found.traffic:
        assert f"{entry.payload_bytes:,}" in report


def test_the_path_of_a_layer_has_its_collectives_in_place() -> None:
    lines = as_text(explained("tp=4", StepShape.of(32, 2000)), "big").splitlines()
    path = lines[next(at for at, line in enumerate(lines) if line.startswith("one layer")) :]
    sums = [at for at, line in enumerate(path) if "all_reduce over 4 tp ranks: 1,048,576,000 B, 1,572,864,000 B" in line]
    assert ["attn.o" in path[sums[0] - 1], "mlp.down" in path[sums[1] - 1], len(sums)] == [True, True, 2]


def test_dp_ranks_are_told_and_each_holds_the_cache_of_its_own_rows() -> None:
    found = explained("attn_dp=2,tp=2", StepShape.of(3, 5, context=27, dp_size=2))
    assert [view.kv_bytes // view.memory.block_bytes for view in found.ranks] == [4, 4, 2, 2]
    text = as_text(found, "m")
    assert "2 DP ranks of 2 ranks each" in text
    assert "attn_dp 1 │ rank 2" in text
    assert {entry.axis for entry, _ in found.traffic} == {"tp"}, "DP ranks say nothing to each other"


def test_a_dp_rank_without_rows_sends_nothing() -> None:
    found = explained("attn_dp=2,tp=2", StepShape.of(1, 5, dp_size=2))
    assert {rank for _, ranks in found.traffic for rank in ranks} == {0, 1}


@pytest.mark.parametrize(
    ("rope", "limit", "source"),
    [
        ({"kind": "yarn", "factor": 4.0, "original_max_position": 1024}, 4096, "1,024 x 4 (yarn)"),
        ({"kind": "dynamic", "factor": 2.5, "original_max_position": 1000}, 2500, "1,000 x 2.5 (dynamic)"),
        ({"kind": "yarn", "factor": 4.0, "original_max_position": 1024}, 8192, "as the file states"),
        ({"kind": "llama3", "factor": 4.0, "original_max_position": 1024}, 4096, "as the file states"),
        ({}, 4096, "as the file states"),
    ],
)
def test_the_context_length_is_told_with_its_source(rope: dict[str, object], limit: int, source: str) -> None:
    found = explained("", rope=RopeSpec.model_validate(rope), max_position=limit)
    assert f"context of at most {limit:,} tokens: {source}" in as_text(found, "m")
    told = as_json(found, "m")["context"]
    assert told["tokens"] == limit
    assert told["from"].startswith(source)
