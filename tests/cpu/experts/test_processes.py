"""Layouts whose tokens are dispatched to experts, as real processes over the real groups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from actors.verify.processes import Workers
from actors.verify.verification import Verification
from placement.layout.layout import Layout
from tests.support.inprocess import rank_config
from tests.support.long_cases import long
from tests.support.models.tiny_models import TinyModel, tiny
from tests.support.verifying import random_prompts, verify


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(16) as pool:
        yield pool


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("glm4_moe", "tp=3,ep=3,dispatch=a2a"),
        ("mixtral", "cp=2,pp=2,ep=2,dispatch=gather"),
        ("deepseek_v2_moe", "attn_dp=2,tp=2,ep=4,dispatch=a2a"),
        ("qwen2_moe", "tp=3,ep=3,redundant_experts=4"),
        ("mixtral", "attn_dp=2,tp=2,ep=2,dispatch=a2a,lm_head=stage"),
        *long(
            ("qwen2_moe", "cp=2,tp=2,ep=4,dispatch=a2a"),
            ("gpt_oss", "tp=4,moe_dp=2,ep=2"),
            ("qwen3_moe", "cp=2,tp=2,ep=2,sp=true,dispatch=a2a"),
            ("deepseek_v3_moe", "cp=2,tp=2,dcp=2,ep=4"),
            ("glm4_moe", "attn_dp=2,ep=2,redundant_experts=3,dispatch=a2a"),
            ("gpt_oss", "attn_dp=3,ep=3,dispatch=gather"),
            ("glm4_moe", "attn_dp=2,moe_dp=2"),
            ("mixtral", "attn_dp=2,cp=2,ep=4,cp_style=allgather"),
            ("qwen3_moe", "attn_dp=2,pp=2,ep=2,dispatch=a2a"),
            ("gpt_oss", "tp=4,dcp=2,ep=2,dispatch=a2a"),
            ("qwen2_moe", "attn_dp=2,tp=2,moe_dp=2,ep=2,sp=true"),
            ("mimo_v2", "tp=8,dcp=2,ep=4"),
            ("mimo_v2", "attn_dp=2,cp=2,pp=2,ep=2"),
        ),
    ],
)
def test_a_layout_of_processes_is_rounding(workers: Workers, family: str, layout: str) -> None:
    check(workers, tiny(family), layout)


@pytest.mark.long
@pytest.mark.parametrize("dispatch", ["gather", "a2a"])
def test_sixteen_ranks_as_four_dp_ranks_of_four_are_rounding(workers: Workers, dispatch: str) -> None:
    check(workers, tiny("qwen3_moe", num_experts=20), f"attn_dp=4,tp=4,ep=16,dispatch={dispatch}")


def test_processes_replay_the_routes_that_threads_replay(workers: Workers) -> None:
    model, layout = tiny("glm4_moe"), "attn_dp=2,ep=2,pp=2,dispatch=a2a"
    config = rank_config(model, Layout.parse(layout), torch.bfloat16, 4)
    report = Verification(config, random_prompts(model, (21, 6)), 2, ["mixed"], start=workers.start).run()
    threads = verify(model, layout, (21, 6), dtype=torch.bfloat16, kinds=["mixed"])
    assert report.verdict == threads.verdict == "rounding"
    assert [case.max_abs_error for case in report.cases] == [case.max_abs_error for case in threads.cases]


def check(workers: Workers, model: TinyModel, layout: str) -> None:
    config = rank_config(model, Layout.parse(layout), block_size=4)
    kinds = ["prefill", "prefix", "mixed"]
    report = Verification(config, random_prompts(model, (21, 6)), 2, kinds, start=workers.start).run()
    assert report.verdict == "rounding", report
    assert report.ranks == "processes"
