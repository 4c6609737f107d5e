"""Bytes and calls from the literature, and the collectives of a step without running it."""

from __future__ import annotations

import pytest

from placement.cost.step_shape import StepShape
from placement.cost.traffic import counters, rank_step_of, rank_traffic, traffic
from placement.layout.layout import Layout
from placement.model.spec import ModelSpec


def llama(**changes: object) -> ModelSpec:
    """64 heads of 128, hidden 8192, MLP 4H."""
    values: dict[str, object] = {
        "family": "llama",
        "hidden_size": 8192,
        "num_layers": 80,
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


LONG, SHORT = StepShape.of(batch=32, tokens=2000), StepShape.of(batch=32, tokens=1)


@pytest.mark.parametrize(("step", "wire_bytes"), [(LONG, 1_572_864_000), (SHORT, 786_432)], ids=["S=2000", "S=1"])
def test_a_layer_makes_two_all_reduces_of_the_published_size(step: StepShape, wire_bytes: int) -> None:
    for rank in range(4):
        entries = [entry for entry in rank_traffic(llama(num_layers=1), Layout(tp=4), rank, step) if "output" in entry.where]
        assert [(entry.op, entry.axis, entry.group_size, entry.calls) for entry in entries] == [("all_reduce", "tp", 4, 1)] * 2
        assert [entry.wire_bytes_per_rank for entry in entries] == [wire_bytes] * 2


def test_a_step_makes_two_sums_a_layer_one_for_the_embedding_and_one_gather() -> None:
    calls, _ = counters(rank_traffic(llama(), Layout(tp=4), 1, SHORT), "tp")
    assert calls == {"all_reduce": 2 * 80 + 1, "all_gather": 1}


@pytest.mark.parametrize("num_layers", [2, 80])
def test_a_stage_boundary_moves_the_hidden_states_once(num_layers: int) -> None:
    spec, layout = llama(num_layers=num_layers), Layout(pp=2)
    both = [rank_traffic(spec, layout, rank, LONG) for rank in range(2)]
    sender, receiver = ([entry for entry in one if entry.where == "stage boundary"] for one in both)
    assert counters(sender, "pp") == ({"send": 1}, {"send": 32 * 2000 * 8192 * 2})
    assert counters(receiver, "pp") == ({"recv": 1}, {"recv": 0})
    assert [entry.payload_bytes for entry in receiver] == [32 * 2000 * 8192 * 2]


@pytest.mark.parametrize("tokens", [2000, 2001])
def test_a_scattered_layer_sends_the_bytes_of_two_sums_in_twice_the_calls(tokens: int) -> None:
    spec, step, layout = llama(num_layers=1), StepShape.of(batch=3, tokens=tokens), Layout(tp=4, sp=True)
    per_rank = []
    for rank in range(4):
        layer = [entry for entry in rank_traffic(spec, layout, rank, step) if entry.where.startswith(("attention", "mlp"))]
        calls, sent = counters(layer, "tp")
        assert calls == {"all_gather": 2, "reduce_scatter": 2}
        per_rank.append(sent)
    whole = 3 * tokens * 8192 * 2
    assert sum(sent["all_gather"] for sent in per_rank) == 2 * 3 * whole
    assert sum(sent["reduce_scatter"] for sent in per_rank) == 2 * 3 * whole
    plain = [entry for entry in rank_traffic(spec, Layout(tp=4), 0, step) if entry.where.startswith(("attention", "mlp"))]
    assert sum(sum(sent.values()) for sent in per_rank) == 4 * sum(entry.wire_bytes_per_rank for entry in plain)


def test_norm_regions_hold_their_share_of_the_tokens() -> None:
    held = [rank_step_of(llama(), Layout(tp=4, sp=True), rank, StepShape.of(1, 2001)).num_hidden for rank in range(4)]
    assert held == [501, 500, 500, 500]
    assert rank_step_of(llama(), Layout(tp=4, sp=True), 0, SHORT).num_hidden == 32


def test_one_rank_says_nothing() -> None:
    assert traffic(llama(), Layout(), LONG) == []


def test_every_rank_appears_with_each_entry_it_makes() -> None:
    layout = Layout(tp=3, pp=2)
    found = traffic(llama(), layout, SHORT)
    for rank in range(layout.world):
        own = rank_traffic(llama(), layout, rank, SHORT)
        assert sorted(map(str, own)) == sorted(str(entry) for entry, ranks in found for maker in ranks if maker == rank)


def test_only_rows_that_choose_a_token_cost_a_gather() -> None:
    entries = rank_traffic(llama(), Layout(tp=4), 0, StepShape.of(batch=5, tokens=7, num_sampled=2))
    assert [(entry.payload_bytes, entry.wire_bytes_per_rank) for entry in entries if entry.op == "all_gather"] == [(16, 48)]
    silent = rank_traffic(llama(), Layout(tp=4), 0, StepShape.of(batch=5, tokens=7, num_sampled=0))
    assert not [entry for entry in silent if entry.op == "all_gather"]
