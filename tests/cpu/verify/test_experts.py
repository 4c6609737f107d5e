"""Layouts of models with experts are rounding, and bugs planted in their experts, routers and sinks are called a fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actors.rank.assembly import Parts
from actors.verify import ranks
from actors.verify.report import Report
from actors.verify.routes import LayerRoutes
from tests.support.models.tiny_models import tiny
from tests.support.verifying import verify

Plant = Callable[[Any], None]
"""Changes layer 2 of one rank."""


def shared_twice(layer: Any) -> None:
    layer.mlp.shared.down.mul_(2)


def wrong_scaling(layer: Any) -> None:
    layer.mlp.router._moe = layer.mlp.router._moe.model_copy(update={"routed_scaling": 1.81})


def other_choice(layer: Any) -> None:
    layer.mlp.router.choice_bias.copy_(layer.mlp.router.choice_bias.roll(1))


def stale_map(layer: Any) -> None:
    layer.mlp.expert_map._table = layer.mlp.expert_map._table.roll(1, 0)


def bias_of_every_rank(layer: Any) -> None:
    layer.mlp.experts.down_bias = nn.Parameter(torch.full(layer.mlp.experts.down.shape[:2], 0.3), requires_grad=False)


def gate_for_up(layer: Any) -> None:
    layer.mlp.experts.gate_up.copy_(layer.mlp.experts.gate_up.roll(1, 1))


def no_sinks(layer: Any) -> None:
    layer.attn.params = replace(layer.attn.params, sinks=None)


def sinks_of_other_heads(layer: Any) -> None:
    layer.attn.sinks.copy_(layer.attn.sinks.flip(0) + 0.5)


def dropped_expert(layer: Any) -> None:
    right = layer.mlp.expert_map.here
    absent = layer.mlp.experts.absent
    layer.mlp.expert_map.here = lambda slots: right(slots).masked_fill(right(slots) == 0, absent)


def absent_is_expert_0(layer: Any) -> None:
    right = layer.mlp.expert_map.here
    absent = layer.mlp.experts.absent
    layer.mlp.expert_map.here = lambda slots: right(slots).masked_fill(right(slots) == absent, 0)


def copies_of_others_run_too(layer: Any) -> None:
    """Whatever expert it holds it runs, whichever the offset names."""
    expert_map = layer.mlp.expert_map
    held = {
        expert: slot for expert, slots in enumerate(expert_map._table.tolist()) for slot in slots if slot in expert_map._own
    }
    mine = {slot: held.get(expert) for expert, slots in enumerate(expert_map._table.tolist()) for slot in slots}
    right = expert_map.here
    expert_map.here = lambda slots: right(slots.clone().apply_(lambda slot: slot if mine[slot] is None else mine[slot]))


def padding_is_routed(layer: Any) -> None:
    """A row of padding goes through the experts with the others, and into the first one's result."""
    right = layer.mlp.run

    def run(x: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
        padded = right(*(torch.cat((rows, rows[-1:])) for rows in (x, weights, slots)))
        padded[:1] += padded[-1:]
        return padded[: len(x)]

    layer.mlp.run = run


def shared_by_every_owner(layer: Any) -> None:
    """The shared expert is run with the routed ones, wherever a token goes."""
    mixture = layer.mlp
    right = mixture.run
    mixture.run = lambda x, weights, experts: right(x, weights, experts) + mixture.shared(x)


@pytest.mark.parametrize(
    ("family", "layout", "plant"),
    [
        ("mixtral", "tp=4,ep=4", stale_map),
        ("mixtral", "cp=2,tp=2,ep=4,dispatch=a2a", stale_map),
        ("mixtral", "attn_dp=2,tp=2,ep=4,dispatch=gather", stale_map),
        ("mixtral", "attn_dp=2,tp=2,ep=4,dispatch=a2a", stale_map),
        ("qwen2_moe", "attn_dp=2,tp=2,ep=4,redundant_experts=4,dispatch=gather", copies_of_others_run_too),
        ("glm4_moe", "tp=2,ep=2,redundant_experts=6", copies_of_others_run_too),
        ("glm4_moe", "attn_dp=2,tp=2,ep=4,dispatch=a2a", padding_is_routed),
        ("mixtral", "attn_dp=2,ep=2,dispatch=gather", padding_is_routed),
        ("qwen2_moe", "attn_dp=2,tp=2,ep=4,dispatch=a2a", shared_by_every_owner),
        ("qwen2_moe", "tp=3,ep=3", dropped_expert),
        ("qwen2_moe", "cp=3,ep=3,dispatch=a2a", dropped_expert),
        ("glm4_moe", "tp=4,ep=4,dispatch=a2a", wrong_scaling),
        ("mixtral", "tp=2,ep=2", absent_is_expert_0),
        ("gpt_oss", "cp=2,ep=2,dispatch=a2a", absent_is_expert_0),
        ("qwen2_moe", "cp=2,ep=2,dispatch=a2a", shared_by_every_owner),
        ("qwen2_moe", "tp=2", shared_twice),
        ("glm4_moe", "tp=2", wrong_scaling),
        ("glm4_moe", "tp=3", other_choice),
        ("mixtral", "tp=2", stale_map),
        ("mixtral", "tp=3", gate_for_up),
        ("gpt_oss", "tp=2", bias_of_every_rank),
        ("gpt_oss", "tp=4,dcp=2", no_sinks),
        ("gpt_oss", "cp=2", sinks_of_other_heads),
    ],
)
def test_a_bug_on_one_rank_is_a_fault_of_its_layer(family: str, layout: str, plant: Plant) -> None:
    def tamper(parts: Parts) -> Parts:
        if parts.config.world_rank == 1:
            with torch.inference_mode(False), torch.no_grad():
                plant(parts.decoder.layers["2"])
        return parts

    report = verify(tiny(family), layout, tamper=tamper, kinds=["prefill", "decode"])
    assert report.verdict == "fault"
    assert report.departs is not None
    assert report.departs.layer == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "layout", "plant"),
    [
        ("mixtral", "cp=2,tp=2,ep=4,dispatch=a2a", stale_map),
        ("mixtral", "attn_dp=2,tp=2,ep=4,dispatch=gather", stale_map),
        ("glm4_moe", "tp=2,ep=2,redundant_experts=6", copies_of_others_run_too),
        ("qwen2_moe", "cp=3,ep=3,dispatch=a2a", dropped_expert),
        ("mixtral", "tp=2,ep=2", absent_is_expert_0),
        ("qwen2_moe", "tp=2", shared_twice),
        ("mixtral", "tp=3", gate_for_up),
    ],
)
def test_a_bug_behind_the_router_is_a_fault_in_bfloat16_by_itself(family: str, layout: str, plant: Plant) -> None:
    def tamper(parts: Parts) -> Parts:
        if parts.config.world_rank == 1:
            with torch.inference_mode(False), torch.no_grad():
                plant(parts.decoder.layers["2"])
        return parts

    report = verify(tiny(family), layout, tamper=tamper, kinds=["prefill", "decode"], dtype=torch.bfloat16)
    rounded = [case for case in report.cases if case.dtype == "bfloat16"]
    assert [case.verdict for case in rounded] == ["fault", "fault"]
    assert all(case.departs is not None and case.departs.layer == 2 for case in rounded)


@pytest.mark.long
def test_a_router_that_rounding_turns_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_bfloat16(seed: int) -> Report:
        return verify(tiny("glm4_moe"), "tp=2,ep=2", (2, 1), dtype=torch.bfloat16, generate=24, seed=seed)

    with monkeypatch.context() as patch:
        patch.setattr(ranks, "replay", lambda parts, routes: None)
        turned = next(seed for seed in range(20) if in_bfloat16(seed).verdict == "fault")
    report = in_bfloat16(turned)
    assert report.verdict == "rounding"
    assert report.routes is not None
    assert "bfloat16 cases judge the maths along given routes" in report.routes


def test_rows_take_the_experts_of_the_nearest_noted_row() -> None:
    noted = LayerRoutes(torch.randn(40, 16), torch.arange(80).view(40, 2))
    rows = torch.tensor([7, 0, 39, 7])
    found = noted.of((noted.inputs[rows] * 1.01).to(torch.bfloat16))
    assert torch.equal(found, noted.experts[rows])
    assert noted.of(torch.empty(0, 16, dtype=torch.bfloat16)).shape == (0, 2)


@pytest.mark.parametrize(
    ("family", "layout"), [("gpt_oss", "tp=5,pp=2"), ("qwen2_moe", "cp=2,tp=2,sp=true"), ("glm4_moe", "tp=4,dcp=2")]
)
def test_without_a_bug_it_is_rounding(family: str, layout: str) -> None:
    report = verify(tiny(family), layout)
    assert report.verdict == "rounding"
    assert report.greedy_match
    assert report.max_abs_error < 2e-5


def a_map_that_stays(parts: Parts) -> None:
    for mixture in parts.decoder.mixtures.values():
        mixture.expert_map.change = lambda experts: None


def a_wrong_slot(parts: Parts) -> None:
    for mixture in parts.decoder.mixtures.values():
        right, slots = mixture.experts.put, mixture.experts.absent
        mixture.experts.put = lambda slot, packed, right=right, slots=slots: right((slot + 1) % slots, packed)


@pytest.mark.parametrize("plant", [a_map_that_stays, a_wrong_slot])
@pytest.mark.parametrize(
    "layout", ["attn_dp=2,ep=2,dispatch=a2a", "tp=2,ep=2", "cp=2,ep=2,redundant_experts=2,dispatch=gather"]
)
def test_a_bug_in_moving_experts_is_a_fault(layout: str, plant: Callable[[Parts], None]) -> None:
    def tamper(parts: Parts) -> Parts:
        if parts.config.world_rank == 1:
            plant(parts)
        return parts

    assert verify(tiny("glm4_moe"), layout, tamper=tamper, kinds=["decode", "prefill"], generate=6).verdict == "fault"
    assert verify(tiny("glm4_moe"), layout, kinds=["decode", "prefill"], generate=6).verdict == "rounding"
