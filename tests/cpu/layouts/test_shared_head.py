"""One LM head for all DP ranks: it gives what one rank gives, whoever's rows they are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from actors.rank.assembly import Parts
from actors.rank.head import StageHead
from actors.wire.requests import GenerateRequest, SamplingParams
from tests.cpu.layouts.test_idle_dp_ranks import CONFIG
from tests.support.inprocess import in_process
from tests.support.long_cases import long
from tests.support.models.tiny_models import tiny
from tests.support.verifying import verify

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama2", "attn_dp=2,lm_head=stage"),
        ("llama2", "attn_dp=3,tp=2,pp=2,sp=true,lm_head=stage"),
        *long(("mixtral", "attn_dp=2,cp=2,tp=2,ep=2,lm_head=stage")),
        ("glm4_moe", "attn_dp=4,ep=4,pp=2,lm_head=stage"),
        ("gemma2", "attn_dp=2,tp=2,pp=2,tp_shares=2/1,lm_head=stage"),
    ],
)
def test_a_shared_head_is_rounding(family: str, layout: str) -> None:
    assert verify(tiny(family, tied=family == "gemma2"), layout).verdict == "rounding"


def test_a_head_that_mixes_up_dp_ranks_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    right = StageHead.logits

    def mixed_up(self: StageHead, rows: Tensor, counts: Sequence[int]) -> Tensor:
        return right(self, rows, counts).flip(0)

    monkeypatch.setattr(StageHead, "logits", mixed_up)
    assert verify(tiny("llama2"), "attn_dp=2,lm_head=stage", [19, 9], kinds=["decode"]).verdict == "fault"


def test_a_rank_with_wrong_rows_of_the_head_is_a_fault() -> None:
    """They are wrong for the rows of all DP ranks."""

    def tamper(parts: Parts) -> Parts:
        if parts.config.world_rank == 1:
            parts.decoder.head.weight.data.zero_()
        return parts

    report = verify(tiny("llama2"), "attn_dp=2,lm_head=stage", [19, 9], kinds=["decode"], tamper=tamper)
    assert report.verdict == "fault"


@pytest.mark.parametrize("layout", ["attn_dp=2,tp=2,ep=4,lm_head=stage", "attn_dp=3,pp=2,ep=3,lm_head=stage"])
def test_every_way_of_choosing_is_that_of_one_rank(layout: str) -> None:
    """Seeds, penalties of tokens that only another DP rank has seen, filters, log-probabilities of prompts and tokens."""
    kinds = [
        SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2),
        SamplingParams(seed=1, frequency_penalty=1.5, presence_penalty=0.5),
        SamplingParams(seed=2, top_k=5, logprobs=2),
        SamplingParams(seed=3, top_p=0.8, repetition_penalty=1.3),
        SamplingParams(seed=4, min_p=0.1, logit_bias={7: 3.0}),
        SamplingParams(temperature=0.0, repetition_penalty=1.8),
    ]
    wanted = [
        GenerateRequest(
            request_id=str(at), prompt=[(5 * at + 3 * token) % 100 for token in range(2 + 6 * at)], max_tokens=12, sampling=kind
        )
        for at, kind in enumerate(kinds)
    ]

    def run(layout: str) -> list[object]:
        with in_process(tiny("qwen2_moe"), layout, CONFIG) as replica:
            waiting = [replica.submit(request) for request in wanted]
            done = [replica.finish(events) for events in waiting]
        scored = [[entry and (entry.token, round(entry.logprob, 3)) for entry in event.prompt_logprobs or ()] for event in done]
        logprobs = [[(entry.token, pytest.approx(entry.logprob, abs=1e-4)) for entry in event.logprobs] for event in done]
        return [[event.tokens for event in done], logprobs, scored]

    assert run(layout) == run("")
