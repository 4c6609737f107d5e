"""The engine's end of the balancer: when it asks and looks, what goes into plans, and the numbers it tells."""

from __future__ import annotations

import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from actors.engine.config.balancing import Balancing
from actors.engine.config.stats import ExpertStats
from actors.engine.eplb import ExpertBalancer
from actors.wire.experts import ExpertMove, ExpertReport, LayerReport
from actors.wire.plans import StepPlan
from placement.experts.expert_map import initial
from serve_app.openai.response.metrics import Metrics, exposition

LAYERS = (1, 3)
LOADS = {1: [80, 80, 1, 1], 3: [10, 10, 10, 10]}


def balancing(**changes: object) -> Balancing:
    usual = {
        "layers": LAYERS,
        "experts": initial(1, 4, 2),
        "ranks": 2,
        "counting": (0, 1),
        "expert_bytes": 1000,
        "ask_every": 4,
    }
    return Balancing.model_validate(usual | changes)


def report(rank: int, step: int = 0) -> ExpertReport:
    """What rank 0, with experts 0 and 1, and rank 1, with 2 and 3, tell of `LOADS`, after four steps."""
    own = range(2 * rank, 2 * rank + 2)
    layers = [
        LayerReport(
            layer=layer,
            tokens=[tokens if expert in own else 0 for expert, tokens in enumerate(LOADS[layer])],
            expert_s=0.5 * (2 - rank),
            combine_s=0.25 * rank,
        )
        for layer in LAYERS
    ]
    return ExpertReport(world_rank=rank, step=step, steps=4, layers=layers, sent_bytes=700 + rank, moved_bytes=0, move_s=0.0)


def moves_of(balancer: ExpertBalancer, plans: int, until: int | None = None) -> list[list[ExpertMove]]:
    """Of the next `plans` plans; with `until`, of as many more as it takes to see that many moves."""
    found = [balancer.into(StepPlan(step=0, rows=[])).moves for _ in range(plans)]
    deadline = time.monotonic() + 20
    while until is not None and sum(map(len, found)) < until:
        assert time.monotonic() < deadline, "the decision did not come"
        found.append(balancer.into(StepPlan(step=0, rows=[])).moves)
    return found


def test_a_load_counts_once_all_ranks_have_told_of_it() -> None:
    balancer = ExpertBalancer(balancing(interval=0, skew=0.8))
    for step in range(3):
        balancer.on_report(report(0, step))  # a first stage is always ahead
    assert moves_of(balancer, 3) == [[]] * 3
    assert balancer.stats().balancedness == []
    balancer.on_report(report(1))
    [move] = [move for moves in moves_of(balancer, 1, until=1) for move in moves]
    assert move.layer == 1, "the other layer is even already"
    assert sorted(move.experts) == [0, 1, 2, 3]
    assert {move.experts.index(0) // 2, move.experts.index(1) // 2} == {0, 1}, "the loaded ones are apart"
    balancer.close()


def test_without_triggers_experts_are_counted_and_stay() -> None:
    balancer = ExpertBalancer(balancing(interval=0))
    for step in range(2000):
        balancer.on_report(report(0, step))
        balancer.on_report(report(1, step))
        assert balancer.into(StepPlan(step=step, rows=[])).moves == []
    stats = balancer.stats()
    assert stats.balancedness == [pytest.approx(81 / 160), 1.0]
    assert stats.top_tokens[0] <= 80 * 2 * 3000 / 4, "the load of long ago is forgotten"
    balancer.close()


def test_ranks_are_asked_now_and_then() -> None:
    balancer = ExpertBalancer(balancing(interval=0))
    assert [balancer.into(StepPlan(step=step, rows=[])).asks_experts for step in range(9)] == [*[False] * 3, True] * 2 + [False]
    balancer.close()


def test_the_endpoint_tells_the_numbers_by_layer_and_rank() -> None:
    balancer = ExpertBalancer(balancing())
    for rank in (0, 1):
        balancer.on_report(report(rank))
    stats = {"r0": balancer.stats().gauges(), "r1": ExpertStats(layers=[1]).gauges()}
    text = exposition(Metrics(), stats, {}).decode()
    found = {
        (sample.name.removeprefix("shardwright_engine_experts_"), *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "_engine_experts_" in sample.name
    }
    replica = ("replica", "r0")
    assert found["balancedness", ("layer", "1"), replica] == pytest.approx(81 / 160)
    assert found["balancedness", ("layer", "3"), replica] == 1.0
    assert found["top_tokens", ("layer", "1"), replica] == 80
    assert found["mean_tokens", ("layer", "1"), replica] == 40.5
    assert [found["sent_bytes", ("rank", str(rank)), replica] for rank in (0, 1)] == [700, 701]
    assert [found["expert_seconds", ("rank", str(rank)), replica] for rank in (0, 1)] == [2.0, 1.0]
    assert [found["combine_seconds", ("rank", str(rank)), replica] for rank in (0, 1)] == [0.0, 0.5]
    assert found["straggler_share", replica] == 0.25
    assert found["moved", replica] == found["moved", ("replica", "r1")] == 0
    balancer.close()
