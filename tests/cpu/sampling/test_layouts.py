"""Sampling from slices of the logits on several ranks gives, bit for bit, what one rank gives."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from actors.groups.group import Group
from actors.groups.solo import SoloGroup
from actors.groups.thread import run_ranks, thread_groups
from actors.sampling.sampler import Sampler, SampleResult, SampleRow
from actors.wire.requests import SamplingParams, TokenLogprob

torch.set_num_threads(1)

VOCAB = 101
WIDTHS = [(51, 50), (64, 64), (101, 27), (40, 30, 40), (64, 64, 64), (26, 26, 26, 26), (96, 8, 8, 8), (128, 1, 1, 2)]
"""Rows of the padded vocabulary a rank holds: even, uneven, padded, and ranks that hold nothing but padding."""


def slices(widths: tuple[int, ...]) -> list[range]:
    return [range(start, stop) for start, stop in pairwise(accumulate(widths, initial=0))]


def part(logits: Tensor, own: range) -> Tensor:
    """A rank's columns; padding holds large numbers, which must never be chosen."""
    return functional.pad(logits, (0, max(0, own.stop - VOCAB)), value=1e9)[:, own.start : own.stop]


def alone(logits: Tensor, rows: list[SampleRow]) -> list[SampleResult]:
    return Sampler(SoloGroup("tp"), range(VOCAB), VOCAB).sample(logits, rows)


def together(widths: tuple[int, ...], logits: Tensor, rows: list[SampleRow]) -> list[SampleResult]:
    """What the ranks choose, having checked that they choose alike."""

    def rank(tp: Group) -> list[SampleResult]:
        own = slices(widths)[tp.rank]
        return Sampler(tp, own, VOCAB).sample(part(logits, own), rows)

    first, *others = run_ranks(thread_groups(len(widths), "tp"), rank)
    assert all(other == first for other in others)
    return first


tokens = st.integers(0, VOCAB - 1)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 2, 7, 60, 90, 101, 1000]),
    min_p=st.sampled_from([0.0, 0.05, 0.7, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.2]),
    logit_bias=st.dictionaries(tokens, st.floats(-100, 100), max_size=3),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from([None, None, 0, 1, 5, 101, 200]),
    min_tokens=st.sampled_from([0, 30]),
    stop_token_ids=st.lists(tokens, max_size=3).map(tuple),
)


@st.composite
def sample_rows(draw: st.DrawFn) -> SampleRow:
    history = draw(st.lists(tokens, min_size=1, max_size=20))
    return SampleRow(draw(params), history, draw(st.integers(1, len(history))))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(WIDTHS), st.lists(sample_rows(), min_size=1, max_size=6), st.integers(0, 2**31), st.booleans())
def test_slices_choose_what_one_rank_chooses(widths: tuple[int, ...], rows: list[SampleRow], seed: int, ties: bool) -> None:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    logits = logits.round() if ties else logits
    before = logits.clone()
    assert together(widths, logits, rows) == alone(logits, rows)
    assert torch.equal(logits, before)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(WIDTHS), st.integers(0, 2**31), st.integers(0, 120), st.booleans())
def test_slices_score_what_one_rank_scores(widths: tuple[int, ...], seed: int, num_top: int, ties: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(9, VOCAB, generator=generator) * 5
    logits = logits.round() if ties else logits
    targets = torch.randint(VOCAB, (9,), generator=generator).tolist()

    def rank(tp: Group) -> list[TokenLogprob]:
        own = slices(widths)[tp.rank]
        return Sampler(tp, own, VOCAB).score(part(logits, own), targets, num_top)

    expected = Sampler(SoloGroup("tp"), range(VOCAB), VOCAB).score(logits, targets, num_top)
    for found in run_ranks(thread_groups(len(widths), "tp"), rank):
        assert found == expected


@settings(max_examples=40, deadline=None)
@given(st.lists(sample_rows(), min_size=2, max_size=6), st.integers(0, 2**31))
def test_a_row_does_not_depend_on_its_batch(rows: list[SampleRow], seed: int) -> None:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    one_by_one = [alone(logits[at : at + 1], [row])[0] for at, row in enumerate(rows)]
    assert alone(logits, rows) == one_by_one


@pytest.mark.parametrize(
    ("sampling", "calls"),
    [
        (SamplingParams(temperature=0), 1),
        (SamplingParams(), 1),
        (SamplingParams(top_k=5, top_p=0.9, min_p=0.1), 1),
        (SamplingParams(top_p=0.9), 1),
        (SamplingParams(min_p=0.1), 2),
        (SamplingParams(temperature=0, logprobs=3), 3),
    ],
)
def test_exchanges_of_a_step_follow_from_the_parameters(sampling: SamplingParams, calls: int) -> None:
    def rank(tp: Group) -> int:
        own = slices((51, 50))[tp.rank]
        sampler = Sampler(tp, own, VOCAB)
        before = tp.calls.total()
        sampler.sample(torch.zeros(2, len(own)), [SampleRow(sampling, [1, 2], 1)] * 2)
        return tp.calls.total() - before

    assert run_ranks(thread_groups(2, "tp"), rank) == [calls, calls]


TINY = [0.0, -0.0, 5e-324, 1e-45, 1e-38, 1e-8, 1e-6, 9e-6, 9.9999e-6, 1e-5, 1.0001e-5, 1.1e-5, 1e-4, 3e-4, 1e-3]
FILTERS: list[dict[str, Any]] = [
    {}, {"top_p": 0.9}, {"top_k": 50}, {"top_k": 50, "min_p": 0.1}, {"min_p": 0.5}, {"top_p": 1e-4}, {"top_k": 7, "top_p": 0.5},
    {"logit_bias": {0: -100.0, 1: -100.0}}, {"logit_bias": {2: 100.0}, "top_p": 0.9}, {"repetition_penalty": 2.0},
    {"min_tokens": 5, "stop_token_ids": (3, 4)},
]  # fmt: skip


@pytest.mark.parametrize("widths", [(VOCAB,), *WIDTHS])
@pytest.mark.parametrize("scale", [1.0, 30.0, 3e4])
def test_tiny_temperatures_are_greedy_without_a_hole(widths: tuple[int, ...], scale: float) -> None:
    """Whatever the filters, down to the smallest number there is, and also in one batch with hot rows."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * scale
    logits[0, 17] = logits.max() + 1
    cold = [
        SampleRow(SamplingParams(temperature=temperature, seed=seed, logprobs=1, **filters), [5, 6], 2)
        for filters in FILTERS
        for temperature in TINY
        for seed in (1, 2)
    ]
    hot = [SampleRow(SamplingParams(temperature=2.0, seed=seed), [5, 6], 2) for seed in range(20)]
    found = together(widths, logits.repeat(len(cold) + len(hot), 1), [*cold, *hot])
    for row, result in zip(cold, found, strict=False):
        expected = 2 if row.sampling.logit_bias.get(2) and scale < 1000 else 17
        assert (result.token, result.error) == (expected, None), row.sampling
        assert result.logprob is not None
        assert -9999 < result.logprob.logprob <= 0
    assert found[len(cold) :] == together(widths, logits.repeat(len(hot), 1), hot)
