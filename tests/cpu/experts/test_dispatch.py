"""Tokens are dispatched to experts: every mode, mix of split and common rows, and factoring is rounding."""

from __future__ import annotations

import pytest
import torch

from actors.groups.solo import SoloGroup
from actors.model.moe.dispatch import AllToAllDispatcher
from placement.cost.expert_dispatch import distinct_ranks
from tests.support.long_cases import long
from tests.support.models.tiny_models import tiny
from tests.support.verifying import verify

LAYOUTS = [
    ("mixtral", "cp=2"),
    ("qwen2_moe", "cp=2,tp=2"),
    ("gpt_oss", "cp=2,tp=2,ep=4"),
    ("qwen3_moe", "cp=3,ep=3,pp=2"),
    ("glm4_moe", "cp=2,tp=2,ep=2,sp=true"),
    ("mixtral", "tp=4,moe_dp=2"),
    ("qwen2_moe", "tp=4,moe_dp=2,ep=2"),
    ("gpt_oss", "cp=2,tp=2,moe_dp=2,ep=2"),
    ("glm4_moe", "tp=6,moe_dp=3,ep=2,dcp=3"),
    ("glm4_moe", "tp=2,moe_dp=2,sp=true"),
]
WAYS = ("gather", "a2a")
CASES = [(*case, WAYS[at % 2]) for at, case in enumerate(LAYOUTS)]
MORE = [(*case, WAYS[(at + 1) % 2]) for at, case in enumerate(LAYOUTS)]
"""The other way of each layout."""


@pytest.fixture(autouse=True)
def short_steps_are_scattered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("placement.layout.sequence_parallel.TOKENS_PER_RANK", 2)


@pytest.mark.parametrize(("family", "layout", "dispatch"), [*CASES, *long(*MORE)])
def test_dispatched_tokens_are_rounding(family: str, layout: str, dispatch: str) -> None:
    report = verify(tiny(family), f"{layout},dispatch={dispatch}", kinds=["prefill", "chunked", "mixed"])
    assert report.verdict == "rounding", report


def test_a_token_goes_once_to_each_rank_of_its_experts() -> None:
    """256 experts, 8 a token, 8 ranks, a router without favour: 5.29 rows a token, not 8."""
    ends = torch.arange(32, 257, 32)
    dispatcher = AllToAllDispatcher(SoloGroup("moe"), [2000], 0, ends, moe_tp=1)
    slots = torch.rand(2000, 256, generator=torch.Generator().manual_seed(0)).topk(8).indices
    sent_to = dispatcher._destinations(slots)
    assert float(sent_to.sum(1, dtype=torch.float32).mean()) == pytest.approx(distinct_ranks(256, 8, 8), rel=0.02)
    assert all(
        {int(slot) // 32 for slot in of_token} == set(ranks.nonzero()[:, 0].tolist())
        for of_token, ranks in zip(slots[:50], sent_to[:50], strict=True)
    )
