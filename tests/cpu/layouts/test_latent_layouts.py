"""Latent attention under every layout computes what one rank computes, and what transformers computes."""

from __future__ import annotations

import random
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from placement.layout.layout import Layout
from tests.support.long_cases import long
from tests.support.models.tiny_decoder import Schedule, chunked, mixed, run, whole
from tests.support.models.tiny_models import tiny
from tests.support.plan_driver import driver

torch.set_num_threads(1)

DENSE = ["deepseek_v2", "deepseek_v3"]
WHOLE = ["deepseek_v2_moe", "deepseek_v3_moe"]
"""6 query heads; V2 without q_lora_rank, V3 with it and with yarn; each with dense layers only, and whole. The naive form
begins at 13 tokens, at fewer behind few."""


def sequences_of(*lengths: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(101) for _ in range(length)] for length in lengths]


SEQUENCES = sequences_of(2, 5, 16, 45)
SCHEDULES: list[Schedule] = [
    whole(SEQUENCES),
    chunked(SEQUENCES, 15, decode=2),
    chunked(SEQUENCES, 6, decode=1),
    mixed(SEQUENCES, 3),
]


@cache
def reference(family: str) -> list[Tensor]:
    return [tiny(family).logits(tokens) for tokens in SEQUENCES]


@cache
def one_rank(family: str) -> list[Tensor]:
    """Of the tokens that the driver asks for."""
    with driver(tiny(family), Layout()) as one:
        return one.play(SEQUENCES, whole(SEQUENCES))


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        *product([*DENSE, *WHOLE], [{"tp": 3}, {"tp": 4, "pp": 2}]),
        *long(*product(DENSE, [{"tp": 2}, {"tp": 4}, {"tp": 5}, {"pp": 3}])),
    ],
    ids=str,
)
def test_heads_on_any_number_of_ranks(family: str, sizes: dict[str, int]) -> None:
    for schedule in SCHEDULES:
        for logits, right in zip(run(tiny(family), Layout(**sizes), SEQUENCES, schedule), reference(family), strict=True):
            torch.testing.assert_close(logits, right, atol=1e-4, rtol=1e-4)


FEW = ["cp=2", "tp=4,dcp=2", "cp=2,tp=3,pp=2"]
MORE = ["cp=4", "cp=3,cp_style=allgather", "tp=2,dcp=2", "tp=6,dcp=3", "tp=5,dcp=5"]
MORE += ["cp=2,tp=4,dcp=4", "cp=2,tp=2,sp=true,cp_style=allgather", "cp=2,tp=2,dcp=2,cp_style=allgather"]


@pytest.mark.parametrize(
    ("family", "text"),
    [*product(["deepseek_v3"], FEW), *long(*product(DENSE, MORE), *product(["deepseek_v2"], FEW), *product(WHOLE, MORE[-3:]))],
)
def test_latents_on_any_number_of_ranks(family: str, text: str) -> None:
    expected = one_rank(family)
    with driver(tiny(family), Layout.parse(text)) as ranks:
        for schedule in SCHEDULES:
            for found, right in zip(ranks.play(SEQUENCES, schedule), expected, strict=True):
                torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("text", ["cp=2", "cp=2,cp_style=allgather", "cp=2,tp=3,dcp=3"])
@pytest.mark.parametrize("family", DENSE)
def test_few_queries_go_to_many_latents(family: str, text: str) -> None:
    """Four new tokens, split over the cp ranks, behind 60."""
    [tokens] = sequences_of(64)
    with driver(tiny(family), Layout()) as one:
        [right] = one.play([tokens], whole([tokens]))
    with driver(tiny(family), Layout.parse(text)) as ranks:
        [found] = ranks.play([tokens], [[(0, 0, 60)], [(0, 60, 4)]])
    torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("changes", [{"attention_bias": True}, {"rope_interleave": False}, {"q_lora_rank": None}], ids=str)
def test_what_a_checkpoint_may_have(changes: dict[str, Any]) -> None:
    model = tiny("deepseek_v3", **changes)
    for layout in (Layout(), Layout(tp=3)):
        for logits, tokens in zip(run(model, layout, SEQUENCES, SCHEDULES[1]), SEQUENCES, strict=True):
            torch.testing.assert_close(logits, model.logits(tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("text", ["tp=2,dcp=2", "cp=2"])
def test_bf16_is_within_its_rounding(text: str) -> None:
    """Error no more than twice that of one bf16 rank against fp32, plus 1e-2."""
    model, errors = tiny("deepseek_v3"), []
    for layout in (Layout(), Layout.parse(text)):
        with driver(model, layout, torch.bfloat16) as ranks:
            found = ranks.play(SEQUENCES, SCHEDULES[1])
        errors.append(max((a - b).abs().max().item() for a, b in zip(found, one_rank("deepseek_v3"), strict=True)))
    assert errors[1] <= 2 * errors[0] + 1e-2
