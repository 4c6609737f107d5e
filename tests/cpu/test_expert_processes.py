"""Layouts whose tokens travel to experts, as real processes over the real groups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from actors.verify.processes import Workers
from actors.verify.verification import Verification
from placement.layout import Layout
from tests.inprocess import rank_config
from tests.tiny_models import tiny
from tests.verifying import random_prompts


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(4) as pool:
        yield pool


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("mixtral", "tp=4,ep=4"),
        ("glm4_moe", "tp=3,ep=3,dispatch=a2a"),
        ("qwen2_moe", "cp=2,tp=2,ep=4,dispatch=a2a"),
        ("gpt_oss", "tp=4,moe_dp=2,ep=2"),
        ("qwen3_moe", "cp=2,tp=2,ep=2,sp=true,dispatch=a2a"),
        ("mixtral", "cp=2,pp=2,ep=2,dispatch=gather"),
    ],
)
def test_a_layout_of_processes_is_rounding(workers: Workers, family: str, layout: str) -> None:
    model = tiny(family)
    config = rank_config(model, Layout.parse(layout), block_size=4)
    kinds = ["prefill", "prefix", "mixed"]
    report = Verification(config, random_prompts(model, (21, 6)), 2, kinds, start=workers.start).run()
    assert report.verdict == "rounding", report
    assert report.ranks == "processes"
