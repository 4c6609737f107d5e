"""Layouts as real processes behind HTTP, against transformers: token-id prompts, greedy, per-token log-probabilities."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from placement.layout.layout import Layout
from tests.ray.server import Server, serving
from tests.support.long_cases import long
from tests.support.models.tiny_models import TinyModel, tiny

LAYOUTS = ["tp=2,pp=2,sp=true", *long("cp=2,tp=4,dcp=2")]
WITH_EXPERTS = [
    ("qwen2_moe", "attn_dp=2,ep=2,redundant_experts=2,replicas=2"),
    *long(
        ("deepseek_v3_moe", "attn_dp=2,pp=2,ep=2,redundant_experts=3,dispatch=a2a"),
        ("mixtral", "attn_dp=2,tp=2,moe_dp=2,ep=2,lm_head=stage"),
    ),
]
"""Together they have every axis. That every layout computes the same is shown without HTTP, in tests/cpu/verify."""
PROMPTS = [[5, 9, 42], list(range(1, 40)), [100]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_equal_transformers(layout: str) -> None:
    model = tiny("llama3")
    with serving(str(model.folder), "--layout", layout, "--dtype", "float32") as server:
        assert len(server.ranks()) == Layout.parse(layout).devices
        check_answers(server, model)


@pytest.mark.parametrize(("family", "layout"), WITH_EXPERTS)
def test_logprobs_of_models_with_experts_equal_transformers(family: str, layout: str) -> None:
    model = tiny(family)
    with serving(str(model.folder), "--layout", layout, "--dtype", "float32") as server:
        assert len(server.ranks()) == Layout.parse(layout).devices
        check_answers(server, model)


@pytest.mark.long
def test_experts_move_while_they_answer_and_metrics_tell() -> None:
    model, layout = tiny("qwen3_moe"), "attn_dp=2,tp=2,ep=2,redundant_experts=2"
    options = ("--layout", layout, "--dtype", "float32", "--rebalance-every", "8", "--rebalance-skew", "0.9")
    with serving(str(model.folder), *options) as server:
        deadline = time.monotonic() + 60
        while not server.gauge("experts_moved"):
            assert time.monotonic() < deadline, f"no expert moved: {server.gauges()}"
            check_answers(server, model)
        check_answers(server, model)
        [gauges] = server.gauges().values()
    assert model.spec.moe is not None
    for layer in model.spec.moe.layers:
        assert 0 < gauges[f"experts_balancedness:layer={layer}"] <= 1
        assert gauges[f"experts_top_tokens:layer={layer}"] >= gauges[f"experts_mean_tokens:layer={layer}"] > 0
    for rank in range(4):
        assert gauges[f"experts_expert_seconds:rank={rank}"] > 0
        assert gauges[f"experts_sent_bytes:rank={rank}"] > 0


def check_answers(server: Server, model: TinyModel) -> None:
    """What the endpoint answers to `PROMPTS`, all sent together, is what transformers says."""
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        answers = list(clients.map(partial(_answer, server), PROMPTS))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        [choice] = answer["choices"]
        check_against(model.reference, prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"])
        assert answer["usage"] == answer["usage"] | {"prompt_tokens": len(prompt), "completion_tokens": 6}


def _answer(server: Server, prompt: list[int]) -> dict[str, Any]:
    options = {"max_tokens": 6, "temperature": 0, "logprobs": 2, "return_token_ids": True, "ignore_eos": True}
    return server.post("/v1/completions", {"prompt": prompt, **options})


def check_against(oracle: torch.nn.Module, prompt: list[int], tokens: list[int], logprobs: list[float]) -> None:
    """Teacher-forced: each token is the oracle's best (within rounding), and its log-probability is the oracle's."""
    with torch.no_grad():
        logits = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    expected = torch.log_softmax(logits, -1)
    chosen = expected[range(len(tokens)), tokens]
    torch.testing.assert_close(torch.tensor(logprobs), chosen, atol=1e-3, rtol=0)
    assert bool((chosen >= expected.max(-1).values - 1e-3).all())
