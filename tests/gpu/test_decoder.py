"""Tiny random models of many kinds on a CUDA device: the logits that transformers computes on the CPU in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from actors.model.attention.backend import AttentionBackend
from actors.model.attention_selection import choose, choose_latent
from actors.model.latent.backend import LatentBackend
from placement.layout.layout import Layout
from tests.support.models.tiny_decoder import Pages, Schedule, chunked, mixed, run, whole
from tests.support.models.tiny_models import TinyModel, tiny

FAMILIES = ("llama3", "qwen2_alternating", "olmo2", "gemma2", "gpt_oss", "qwen3_moe", "mimo_v2", "deepseek_v2_moe")
SEQUENCES = [[index * 7 % 101 for index in range(length)] for length in (5, 30, 18)]
SCHEDULES = {"whole": whole(SEQUENCES), "chunked": chunked(SEQUENCES, 7, decode=3), "mixed": mixed(SEQUENCES)}
PAGES = Pages(block_size=16)


def logits(
    model: TinyModel, schedule: Schedule, dtype: torch.dtype, device: torch.device, layout: str = "tp=1"
) -> list[Tensor]:
    """[tokens, vocab] fp32 of every sequence, on the CPU, by the attention that a rank on `device` would choose."""
    spec = model.spec

    def attention() -> AttentionBackend | LatentBackend:
        if spec.mla is not None:
            return choose_latent(spec.mla, device, dtype, PAGES.block_size)
        kind, softcap = spec.kinds[0], spec.attention_softcap is not None
        return choose(device, dtype, PAGES.block_size, softcap, spec.sinks != "none", kind.key_dim, kind.value_dim)

    found = run(model, Layout.parse(layout), SEQUENCES, schedule, PAGES, attention, dtype=dtype, device=device)
    return [rows.cpu() for rows in found]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_logits_equal_those_of_transformers(family: str, schedule: str, device: torch.device) -> None:
    model = tiny(family)
    for tokens, found in zip(SEQUENCES, logits(model, SCHEDULES[schedule], torch.float32, device), strict=True):
        torch.testing.assert_close(found, model.logits(tokens), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_logits_are_as_far_from_fp32_as_on_the_cpu(family: str, device: torch.device) -> None:
    """Rounding alone separates them: no more than twice as far as the CPU's own bf16 logits are from its fp32 ones."""
    model = tiny(family)
    right = logits(model, SCHEDULES["chunked"], torch.float32, torch.device("cpu"))
    on_cpu = logits(model, SCHEDULES["chunked"], torch.bfloat16, torch.device("cpu"))
    found = logits(model, SCHEDULES["chunked"], torch.bfloat16, device)
    assert _distance(found, right) <= 2 * _distance(on_cpu, right)


@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "tp=2,pp=2"])
def test_ranks_that_share_a_device_equal_one_rank(layout: str, device: torch.device) -> None:
    """Ranks are threads here; their groups hand tensors over in the device's memory."""
    model = tiny("llama3")
    together = logits(model, SCHEDULES["mixed"], torch.float32, device, layout)
    for found, right in zip(together, logits(model, SCHEDULES["mixed"], torch.float32, device), strict=True):
        torch.testing.assert_close(found, right, atol=1e-3, rtol=1e-3)


def _distance(found: list[Tensor], right: list[Tensor]) -> float:
    """Root mean square of all differences."""
    return float((torch.cat(found) - torch.cat(right)).square().mean().sqrt())
