"""Random (tiny model with experts, layout, prompts, cases), ranks as threads: every one is rounding.

A failure prints what draws it again.
"""

from __future__ import annotations

import random
import zlib

import pytest
import torch

from actors.verify.cases import KINDS
from placement.layout import sequence_parallel
from tests.support.layout_draws import draw_layout
from tests.support.long_cases import long
from tests.support.models.tiny_models import tiny
from tests.support.verifying import verify

WITH_EXPERTS = (
    "mixtral",
    "mixtral_one",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    "glm4_moe",
    "mimo_v2",
    "deepseek_v2_moe",
    "deepseek_v3_moe",
)


@pytest.fixture(autouse=True)
def short_steps_are_scattered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_parallel, "TOKENS_PER_RANK", 2)


@pytest.mark.parametrize("draws", [range(3), *long(range(3, 19))], ids=str)
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_random_expert_layouts_of(family: str, draws: range) -> None:
    draw = random.Random(zlib.crc32(f"{family} {draws}".encode()))
    model, wrong = tiny(family, num_hidden_layers=2), []
    assert model.spec.moe is not None
    for number in draws:
        layout = draw_layout(draw, model.spec)
        while layout.stage_ranks == 1:
            layout = draw_layout(draw, model.spec)
        lengths = [draw.randint(1, 30) for _ in range(draw.randint(1, 3))]
        how = {
            "generate": draw.randint(0, 3),
            "block_size": draw.choice((4, 8)),
            "seed": number,
            "kinds": draw.sample(KINDS, 2),
            "dtype": torch.bfloat16 if draw.random() < 0.1 else torch.float32,
        }
        report = verify(model, str(layout), lengths, **how)
        if report.verdict != "rounding":
            wrong.append((str(layout), lengths, how, report.cases))
    assert wrong == []
