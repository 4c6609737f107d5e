"""The live balancer: experts move between steps, and no token changes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from actors.engine import loop
from actors.engine.config.balancing import Balancing
from actors.engine.config.engine_config import EngineConfig
from actors.engine.eplb import ExpertBalancer
from actors.model.moe.router import Router
from actors.wire.experts import ExpertReport
from actors.wire.requests import GenerateRequest, SamplingParams
from placement.experts.expert_map import ExpertMap, bound
from placement.experts.moves import moves, settled
from placement.experts.rebalancer import Costs, Decision, Rebalancer, Watch, predicted
from placement.layout.layout import Layout
from tests.support.expert_loads import shuffled
from tests.support.inprocess import in_process
from tests.support.long_cases import long
from tests.support.models.tiny_models import tiny


class Shuffler:
    """A policy that looks every `interval` steps and places all experts anew, whatever their load."""

    def __init__(self, interval: int, seed: int = 0) -> None:
        self._watch, self._draw = Rebalancer(interval), random.Random(seed)

    def after_step(self, watch: Watch, evenness: float) -> Watch:
        return self._watch.after_step(watch, evenness)

    def decide(
        self, old: ExpertMap, load: Sequence[Sequence[float]], costs: Costs, nodes: int = 1, groups: int = 1
    ) -> Decision:
        new = settled(old, shuffled(old, self._draw))
        transfers = moves(old, new)
        return Decision(new, tuple(transfers), predicted(old, new, transfers, load, costs))


@pytest.mark.parametrize(
    ("family", "layout", "steps"),
    [
        ("qwen3_moe", "attn_dp=4,ep=4,redundant_experts=2", 120),
        ("mixtral_one", "attn_dp=2,ep=2,pp=2,dispatch=a2a", 120),
        *long(
            ("mixtral", "attn_dp=2,ep=2,redundant_experts=1", 2000),
            ("gpt_oss", "tp=4,ep=2", 120),
            ("glm4_moe", "attn_dp=2,tp=2,ep=4,pp=2,dispatch=a2a", 120),
            ("mixtral", "cp=2,tp=2,moe_dp=2,ep=2,dispatch=gather", 120),
        ),
    ],
)
def test_experts_that_move_every_twenty_steps_change_no_token(
    family: str, layout: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(family, num_hidden_layers=3)
    made: list[ExpertBalancer] = []

    def shuffling(config: Balancing) -> ExpertBalancer:
        made.append(ExpertBalancer(config, Shuffler(20)))
        return made[-1]

    balancing = Balancing.of(model.spec, Layout.parse(layout), 4, rebalance_every=20, rebalance_skew=None)
    assert balancing is not None
    balancing = balancing.model_copy(update={"ask_every": 5})
    config = EngineConfig(block_size=16, num_blocks=512, max_model_len=steps + 40, max_batch_tokens=64)
    wanted = [
        GenerateRequest(
            request_id=str(name), prompt=[3 + name, 17, 40 + name], max_tokens=steps, sampling=SamplingParams(temperature=0.0)
        )
        for name in range(3)
    ]

    def run(layout: str, config: EngineConfig) -> list[list[int]]:
        with in_process(model, layout, config) as replica:
            waiting = [replica.submit(request) for request in wanted]
            return [replica.finish(events).tokens for events in waiting]

    expected = run("", config)
    monkeypatch.setattr(loop, "ExpertBalancer", shuffling)
    found = run(layout, config.model_copy(update={"experts": balancing}))
    assert found == expected
    (balancer,) = made
    assert balancer.stats().moved_experts > steps // 20
    assert balancer.map.experts != (balancing.experts.experts[0],) * len(balancing.layers)


@pytest.mark.long
def test_a_skewed_router_is_balanced(monkeypatch: pytest.MonkeyPatch) -> None:
    """One expert gets two fifths of all (token, expert) pairs: 0.8 of the tokens, of two experts each."""
    hot, right = 11, Router.choose

    def choose(self: Router, scores: Tensor) -> Tensor:
        """The others are as good as drawn by lot, so that the load does not change with the texts."""
        lots = scores.mul(1e4).remainder(1)
        lots[:, hot] += torch.where(lots[:, 0] < 0.8, 10.0, -10.0)
        return right(self, lots)

    monkeypatch.setattr(Router, "choose", choose)
    model, layout = tiny("qwen3_moe", num_experts=12), Layout.parse("attn_dp=4,ep=4,redundant_experts=4")
    balancing = Balancing.of(model.spec, layout, 4, rebalance_every=100, rebalance_skew=None)
    assert balancing is not None
    balancing = balancing.model_copy(update={"ask_every": 50, "must_pay": False})
    config = EngineConfig(block_size=16, num_blocks=512, max_model_len=400, max_batch_tokens=64, max_sequences=16)
    wanted = [
        GenerateRequest(request_id=str(name), prompt=[1 + name], max_tokens=260, sampling=SamplingParams(seed=name))
        for name in range(32)
    ]

    made: list[ExpertBalancer] = []
    seen: list[list[float]] = []
    on_report = ExpertBalancer.on_report

    def watched(self: ExpertBalancer, report: ExpertReport) -> None:
        on_report(self, report)
        seen.append(self.stats().balancedness)

    monkeypatch.setattr(loop, "ExpertBalancer", lambda config: made.append(ExpertBalancer(config)) or made[-1])
    monkeypatch.setattr(ExpertBalancer, "on_report", watched)
    with in_process(model, str(layout), config.model_copy(update={"experts": balancing})) as replica:
        for events in [replica.submit(request) for request in wanted]:
            assert replica.finish(events).finish == "length"
    stats, first = made[0].stats(), next(even for even in seen if even)
    assert stats.moved_experts > 0
    load = made[0]._window.load
    for before, after, most in zip(first, stats.balancedness, bound(load, balancing.experts.slots), strict=True):
        assert before < 0.75
        assert after >= 0.9 * most


def test_a_lone_sequence_uses_all_copies() -> None:
    """Two of everything on two ranks: each runs half of what one request asks for."""
    model, layout = tiny("mixtral"), Layout.parse("attn_dp=2,ep=2,redundant_experts=4")
    balancing = Balancing.of(model.spec, layout, 4, rebalance_every=0, rebalance_skew=None)
    assert balancing is not None
    config = EngineConfig(block_size=16, num_blocks=64, max_model_len=200, experts=balancing)
    with in_process(model, str(layout), config) as replica:
        prompt, sampling = [5], SamplingParams(temperature=0.0)
        replica.run(GenerateRequest(request_id="one", prompt=prompt, max_tokens=130, sampling=sampling))
        stats = replica.engine.stats().experts
    assert stats is not None
    assert min(stats.balancedness) > 0.9
