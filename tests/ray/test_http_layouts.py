"""Layouts as real processes behind HTTP, against transformers: token-id prompts, greedy, per-token log-probabilities."""

from __future__ import annotations

import pytest
import torch

from placement.layout import Layout
from tests.ray.server import serving
from tests.tiny_models import tiny

LAYOUTS = [
    "",
    "tp=2",
    "tp=3",
    "pp=2",
    "tp=2,pp=2",
    "replicas=2",
    "tp=2,sp=true",
    "cp=2",
    "tp=4,dcp=2",
    "tp=2,pp=2,cp=2,cp_style=allgather",
    "attn_dp=2",
]
PROMPTS = [[5, 9, 42], list(range(1, 40)), [100]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_equal_transformers(layout: str) -> None:
    model = tiny("llama3")
    with serving(str(model.folder), "--layout", layout, "--dtype", "float32") as server:
        assert len(server.ranks()) == Layout.parse(layout).devices
        for prompt in PROMPTS:
            body = {
                "prompt": prompt,
                "max_tokens": 6,
                "temperature": 0,
                "logprobs": 2,
                "return_token_ids": True,
                "ignore_eos": True,
            }
            answer = server.post("/v1/completions", body)
            choice = answer["choices"][0]
            check_against(model.reference, prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"])
            assert answer["usage"] == answer["usage"] | {"prompt_tokens": len(prompt), "completion_tokens": 6}


def check_against(oracle: torch.nn.Module, prompt: list[int], tokens: list[int], logprobs: list[float]) -> None:
    """Teacher-forced: each token is the oracle's best (within rounding), and its log-probability is the oracle's."""
    with torch.no_grad():
        logits = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    expected = torch.log_softmax(logits, -1)
    chosen = expected[range(len(tokens)), tokens]
    torch.testing.assert_close(torch.tensor(logprobs), chosen, atol=1e-3, rtol=0)
    assert bool((chosen >= expected.max(-1).values - 1e-3).all())
