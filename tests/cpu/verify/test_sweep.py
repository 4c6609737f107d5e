"""Some three hundred random (tiny model, layout, prompts, cases), ranks as threads: every one is rounding.

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
from tests.support.models.tiny_models import FAMILIES, TinyModel, tiny
from tests.support.verifying import verify

SHAPES = (
    {},
    {"num_key_value_heads": 1},
    {"num_key_value_heads": 6},
    {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 5},
)
"""6 query heads on 2 KV heads, one KV head for all, one for each, and an odd number of heads."""


def small(family: str, shape: int) -> TinyModel:
    """Two layers of a family, or three (for uneven stages); as many as it lists where it lists what each of them is."""
    layers = {} if "layer_types" in FAMILIES[family] else {"num_hidden_layers": 2 + shape % 2}
    sizes = {**layers, **SHAPES[shape]}
    if "kv_lora_rank" in FAMILIES[family]:  # every query head has keys of its own
        sizes["num_key_value_heads"] = sizes.get("num_attention_heads", 6)
    if (
        "num_attention_heads" in FAMILIES[family] and "num_attention_heads" in sizes
    ):  # layers with a window have twice the KV heads
        sizes["num_attention_heads"] *= 2
    return tiny(family, tied=shape == 1, **sizes)


@pytest.fixture(autouse=True)
def short_steps_are_scattered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_parallel, "TOKENS_PER_RANK", 2)


@pytest.mark.parametrize("draws", [range(2), *long(range(2, 12))], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_random_layouts_of(family: str, draws: range) -> None:
    draw = random.Random(zlib.crc32(f"{family} {draws}".encode()))
    wrong = []
    for number in draws:
        model = small(family, draw.randrange(len(SHAPES)) if number % 4 == 0 else 0)
        layout = draw_layout(draw, model.spec)
        lengths = [draw.randint(1, 30) for _ in range(draw.randint(1, 3))]
        kinds = draw.sample(KINDS, 2)
        dtype = torch.bfloat16 if draw.random() < 0.06 else torch.float32
        how = {"generate": draw.randint(0, 3), "block_size": draw.choice((4, 8)), "seed": number, "kinds": kinds}
        report = verify(model, str(layout), lengths, dtype=dtype, **how)
        if report.verdict != "rounding":
            wrong.append((str(layout), lengths, dtype, how, model.spec, report.cases))
    assert wrong == []
