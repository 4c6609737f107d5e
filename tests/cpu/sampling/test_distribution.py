"""Sampled tokens follow the distribution that transformers' filters leave, and never lie outside the vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from actors.groups.group import Group
from actors.groups.solo import SoloGroup
from actors.groups.thread import run_ranks, thread_groups
from actors.sampling.sampler import Sampler, SampleRow
from actors.wire.requests import SamplingParams

torch.set_num_threads(1)

VOCAB, DRAWS = 37, 10_000
LOGITS = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5)) * 2


def expected(params: SamplingParams) -> Tensor:
    """[VOCAB] probabilities after transformers' filters, in its order."""
    filters = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        filters.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        filters.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        filters.append(MinPLogitsWarper(params.min_p))
    return filters(torch.zeros(1, 1, dtype=torch.int64), LOGITS.clone())[0].softmax(-1).double()


def counts(params: SamplingParams, vary: str) -> Tensor:
    """[VOCAB] how often each token came, over many seeds or many positions."""
    rows = [
        SampleRow(params.model_copy(update={"seed": n if vary == "seed" else 4}), range(1 if vary == "seed" else n + 1), 1)
        for n in range(DRAWS)
    ]
    choices = Sampler(SoloGroup("tp"), range(VOCAB), VOCAB).sample(LOGITS.expand(DRAWS, -1), rows)
    return torch.bincount(torch.tensor([choice.token for choice in choices]), minlength=VOCAB)


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 5},
        {"top_p": 0.8},
        {"temperature": 2.0, "top_p": 0.6},
        {"min_p": 0.05},
        {"top_k": 12, "top_p": 0.7},
        {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
        {"top_p": 0.95, "min_p": 0.03},
    ],
    ids=str,
)
def test_tokens_follow_the_filtered_softmax(filters: dict[str, float], vary: str) -> None:
    params = SamplingParams(**filters)
    probabilities, found = expected(params), counts(params, vary)
    assert found[probabilities == 0].sum() == 0
    held = probabilities * DRAWS > 5
    observed, wanted = found[held].double(), probabilities[held] * DRAWS
    free = max(1, int(held.sum()) - 1)
    assert (((observed - wanted) ** 2 / wanted).sum() - free) / math.sqrt(2 * free) < 4.5


def test_a_filter_keeps_what_it_should() -> None:
    """Exactly the tokens transformers keeps come out, given enough draws at a high temperature."""
    params = SamplingParams(temperature=4.0, top_p=0.9)
    assert torch.equal(counts(params, "seed") > 0, expected(params) > 0)


@pytest.mark.parametrize("ranks", [1, 3])
def test_padding_is_never_sampled(ranks: int) -> None:
    """A small odd vocabulary at a high temperature, where padding columns hold whatever the head computed."""
    vocab, width = 101, -(-128 // ranks)
    rows = [SampleRow(SamplingParams(temperature=5.0, seed=9), range(n + 1), 1) for n in range(2000)]

    def rank(tp: Group) -> list[int]:
        own = range(tp.rank * width, (tp.rank + 1) * width)
        logits = torch.zeros(len(rows), width)
        logits[:, max(0, vocab - own.start) :] = 50.0
        return [choice.token for choice in Sampler(tp, own, vocab).sample(logits, rows)]

    tokens = run_ranks(thread_groups(ranks, "tp"), rank)
    assert all(one == tokens[0] for one in tokens)
    assert min(tokens[0]) >= 0
    assert max(tokens[0]) < vocab
    assert len(set(tokens[0])) == vocab
