"""Tokens travel to experts: every mode, mix of split and common rows, and factoring is rounding."""

from __future__ import annotations

import pytest

from tests.tiny_models import tiny
from tests.verifying import verify

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


@pytest.fixture(autouse=True)
def short_steps_are_scattered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("placement.sequence_parallel.TOKENS_PER_RANK", 2)


@pytest.mark.parametrize("dispatch", ["gather", "a2a"])
@pytest.mark.parametrize(("family", "layout"), LAYOUTS)
def test_tokens_that_travel_are_rounding(family: str, layout: str, dispatch: str) -> None:
    report = verify(tiny(family), f"{layout},dispatch={dispatch}", kinds=["prefill", "chunked", "mixed"])
    assert report.verdict == "rounding", report
