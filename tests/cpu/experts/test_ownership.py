"""Experts split over ep ranks and their columns over moe_tp ranks, every rank running its own on all tokens."""

from __future__ import annotations

import pytest

from placement.layout.layout import Layout
from placement.layout.mesh import coords_of
from placement.ownership.shards import shard
from tests.support.models.tiny_models import tiny
from tests.support.verifying import verify


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("mixtral", "tp=4,ep=4"),
        ("qwen2_moe", "tp=4,ep=2"),
        ("qwen3_moe", "tp=3,ep=3,pp=2"),
        ("gpt_oss", "tp=4,ep=2,dcp=2"),
        ("glm4_moe", "tp=4,ep=4,sp=true"),
        ("gpt_oss", "tp=6,ep=3,tp_shares=2/1/1/1/1/1"),
    ],
)
def test_experts_on_ep_ranks_are_rounding(family: str, layout: str) -> None:
    assert verify(tiny(family), layout, kinds=["prefill", "mixed"]).verdict == "rounding"


@pytest.mark.parametrize("layout", ["tp=4,ep=4", "tp=4,ep=2", "tp=3,ep=3", "tp=6,ep=2", "tp=5", "tp=3,tp_shares=3/1/1"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_every_column_of_every_expert_is_on_one_rank(family: str, layout: str) -> None:
    spec, parsed = tiny(family).spec, Layout.parse(layout)
    assert spec.moe is not None
    owns = [shard(spec, parsed, coords_of(parsed, rank)) for rank in range(parsed.world)]
    held = sorted((expert, column) for own in owns for expert in own.experts for column in own.expert_columns)
    assert held == [(expert, column) for expert in range(spec.moe.num_experts) for column in range(spec.moe.expert_size)]
    shared = sorted(column for own in owns for column in own.shared_columns)
    assert shared == list(range(spec.moe.shared_size))
