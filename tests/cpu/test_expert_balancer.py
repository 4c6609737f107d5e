"""The live balancer: experts move between steps, and no token changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from actors.engine import loop
from actors.engine.balancing import Balancing, ExpertBalancer
from actors.engine.config import EngineConfig
from actors.messages import GenerateRequest, SamplingParams
from placement.expert_moves import moves, settled
from placement.experts import ExpertMap
from placement.layout import Layout
from placement.rebalancer import Costs, Decision, Rebalancer, Watch, predicted
from tests.inprocess import in_process
from tests.tiny_models import tiny


class Shuffler:
    """A policy that looks every `interval` steps and deals all experts anew, whatever their load."""

    def __init__(self, interval: int, seed: int = 0) -> None:
        self._watch, self._draw = Rebalancer(interval), random.Random(seed)

    def after_step(self, watch: Watch, evenness: float) -> Watch:
        return self._watch.after_step(watch, evenness)

    def decide(
        self, old: ExpertMap, load: Sequence[Sequence[float]], costs: Costs, nodes: int = 1, groups: int = 1
    ) -> Decision:
        new = settled(old, replace(old, experts=tuple(self._dealt(old) for _ in old.experts)))
        transfers = moves(old, new)
        return Decision(new, tuple(transfers), predicted(old, new, transfers, load, costs))

    def _dealt(self, old: ExpertMap) -> tuple[int, ...]:
        row = [expert % old.num_experts for expert in range(sum(old.slots))]
        while True:
            self._draw.shuffle(row)
            if all(len(set(row[slots.start : slots.stop])) == len(slots) for slots in old.ranges):
                return tuple(row)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_moe", "attn_dp=4,ep=4,redundant_experts=2"),
        ("gpt_oss", "tp=4,ep=2"),
        ("glm4_moe", "attn_dp=2,tp=2,ep=4,pp=2,dispatch=a2a"),
        ("mixtral", "cp=2,tp=2,moe_dp=2,ep=2,dispatch=gather"),
    ],
)
def test_experts_that_move_every_twenty_steps_change_no_token(
    family: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, steps = tiny(family, num_hidden_layers=3), 240
    made: list[ExpertBalancer] = []

    def shuffling(config: Balancing) -> ExpertBalancer:
        made.append(ExpertBalancer(config, Shuffler(20)))
        return made[-1]

    balancing = Balancing.of(model.spec, Layout.parse(layout), 4, interval=20, skew=None)
    assert balancing is not None
    config = EngineConfig(block_size=16, num_blocks=64, max_model_len=steps + 40, max_batch_tokens=64)
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
    assert balancer.stats().moved_experts > 20
    assert balancer.map.experts != (balancing.experts.experts[0],) * len(balancing.layers)
