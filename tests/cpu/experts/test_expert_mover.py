"""Moves of experts on real ranks: whatever the load, every slot holds all of the expert that the map names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actors.groups.group import Group
from actors.groups.thread import run_ranks, thread_groups
from actors.model.moe.block import MixtureOfExperts
from actors.model.moe.expert_mover import ExpertWeightMover
from actors.model.moe.experts import Experts, gated_by
from actors.model.moe.layer_expert_map import LayerExpertMap
from actors.model.moe.router import Router
from actors.wire.experts import ExpertMove
from placement.experts.expert_map import ExpertMap, initial, place
from placement.experts.moves import moves, settled
from placement.layout.partition import partition
from placement.model.moe_spec import MoESpec
from tests.support.long_cases import long

torch.set_num_threads(1)

HIDDEN, COLUMNS, LAYER = 3, 5, 7
LOADS_EACH = 50


@dataclass(frozen=True)
class Case:
    """Experts on ranks."""

    experts: int
    ep: int
    redundant: int
    moe_tp: int = 1
    biases: bool = True
    dtype: torch.dtype = torch.float32

    @property
    def size(self) -> int:
        return self.ep * self.moe_tp

    def columns(self, rank: int) -> range:
        """Of every expert, on a rank: 3 and 2 of 5 with moe_tp=2."""
        return partition(COLUMNS, self.moe_tp)[rank % self.moe_tp]


CASES = [
    Case(experts=10, ep=4, redundant=2, moe_tp=2),
    Case(experts=7, ep=3, redundant=0),
    Case(experts=6, ep=2, redundant=5, moe_tp=2, biases=False),
    Case(experts=16, ep=4, redundant=7, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("case", [*CASES[1:], *long(CASES[0])], ids=str)
def test_fifty_random_skews_leave_every_slot_with_its_expert(case: Case) -> None:
    maps = [initial(1, case.experts, case.ep, case.redundant), *random_maps(case)]
    made = [move_between(old, new) for old, new in pairwise(maps)]
    assert sum(bool(move.transfers) for move in made) > LOADS_EACH * 0.8

    def body(group: Group) -> None:
        mover, mixture = rank_of(case, group, maps[0])
        own = maps[0].ranges[group.rank // case.moe_tp]
        for move in made:
            mover.move([move])
            check(mixture, [move.experts[slot] for slot in own], case.columns(group.rank))

    run_ranks(thread_groups(case.size, "moe", 20.0), body)


def test_a_tensor_left_behind_is_found() -> None:
    """What moves only some of an expert's tensors fails the check above."""
    case = CASES[0]
    old = initial(1, case.experts, case.ep, case.redundant)
    move = move_between(old, next(iter(random_maps(case))))

    def body(group: Group) -> None:
        mover, mixture = rank_of(case, group, old)
        stays = mixture.experts.down_bias
        assert stays is not None
        before = stays.clone()
        mover.move([move])
        stays.copy_(before)
        own = old.ranges[group.rank // case.moe_tp]
        check(mixture, [move.experts[slot] for slot in own], case.columns(group.rank))

    with pytest.raises(AssertionError, match="down_bias"):
        run_ranks(thread_groups(case.size, "moe", 20.0), body)


def random_maps(case: Case) -> list[ExpertMap]:
    """What random skewed loads are placed as, one after the other; each has all experts and as many copies as asked for."""
    source = np.random.default_rng(case.experts)
    found = [initial(1, case.experts, case.ep, case.redundant)]
    for _ in range(LOADS_EACH):
        load = source.pareto(0.7, case.experts) * (source.random(case.experts) < 0.8)  # some idle altogether
        new = place([load.tolist()], case.ep, case.redundant)
        assert min(new.copies(0)) >= 1
        assert sum(new.copies(0)) == case.experts + case.redundant
        assert all(len(set(new.on_rank(0, rank))) == new.slots[rank] for rank in range(case.ep)), "a rank has one twice"
        found.append(settled(found[-1], new))
    return found[1:]


def move_between(old: ExpertMap, new: ExpertMap) -> ExpertMove:
    transfers = [(each.source_slot, each.target_slot) for each in moves(old, new)]
    return ExpertMove(layer=LAYER, experts=list(new.experts[0]), transfers=transfers)


def rank_of(case: Case, group: Group, placed: ExpertMap) -> tuple[ExpertWeightMover, MixtureOfExperts]:
    """A rank with the experts of a map in its slots."""
    own = placed.ranges[group.rank // case.moe_tp]
    held = [tensors(placed.experts[0][slot], case.columns(group.rank), case.dtype) for slot in own]
    stacked = {name: nn.Parameter(torch.stack([each[name] for each in held])) for name in held[0]}
    biases = (stacked["gate_up_bias"], stacked["down_bias"]) if case.biases else (None, None)
    experts = Experts(stacked["gate_up"], stacked["down"], gated_by(F.silu), *biases)
    spec = MoESpec(num_experts=case.experts, top_k=1, expert_size=COLUMNS, layers=(LAYER,))
    router = Router(spec, nn.Parameter(torch.zeros(case.experts, HIDDEN)))
    mixture = MixtureOfExperts(router, experts, LayerExpertMap(placed.experts[0], own, torch.device("cpu"))).requires_grad_(
        False
    )
    return ExpertWeightMover({LAYER: mixture}, group, placed, case.moe_tp, group.rank), mixture


def tensors(expert: int, columns: range, dtype: torch.dtype) -> dict[str, Tensor]:
    """An expert's columns: every number tells the expert, the tensor and the place."""

    def filled(kind: int, *shape: int) -> Tensor:
        places = torch.arange(int(np.prod(shape))).view(shape)
        return (expert * 8 + kind * 2 + places / 64).to(torch.float32)

    gate, up = filled(0, COLUMNS, HIDDEN), filled(1, COLUMNS, HIDDEN)
    own = slice(columns.start, columns.stop)
    whole = {
        "gate_up": torch.cat([gate[own], up[own]]),
        "down": filled(2, HIDDEN, COLUMNS)[:, own],
        "gate_up_bias": torch.cat([filled(3, COLUMNS)[own], filled(3, COLUMNS)[own] + 1]),
        "down_bias": filled(3, HIDDEN) + 0.5,
    }
    return {name: value.to(dtype).contiguous() for name, value in whole.items()}


def check(mixture: MixtureOfExperts, wanted: Sequence[int], columns: range) -> None:
    """Every parameter of every slot is that of its expert, to the bit; tokens are counted for it."""
    assert mixture.expert_map.held.tolist() == list(wanted)
    for slot, expert in enumerate(wanted):
        for name, weight in mixture.experts.named_parameters():
            right = tensors(expert, columns, weight.dtype)[name]
            assert torch.equal(weight[slot], right), f"slot {slot} has not all of expert {expert}: {name}"
