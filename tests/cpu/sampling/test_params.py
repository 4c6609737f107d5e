"""Each sampling parameter does what its name promises, and what transformers does."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from actors.groups.solo import SoloGroup
from actors.sampling.edits import edit
from actors.sampling.sampler import Sampler, SampleResult, SampleRow
from actors.wire.requests import SamplingParams

torch.set_num_threads(1)

VOCAB = 50
GREEDY = SamplingParams(temperature=0.0)
tokens = st.integers(0, VOCAB - 1)


def sampler(vocab: int = VOCAB) -> Sampler:
    return Sampler(SoloGroup("tp"), range(vocab), vocab)


def random_logits(rows: int = 1, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def sample(logits: Tensor, params: SamplingParams, history: list[int] | None = None, prompt_length: int = 1) -> SampleResult:
    return sampler(logits.shape[1]).sample(logits, [SampleRow(params, history or [0], prompt_length)])[0]


def edited(logits: Tensor, params: SamplingParams, history: list[int], prompt_length: int) -> Tensor:
    changed = logits[0].clone()
    edit(changed, SampleRow(params, history, prompt_length), range(logits.shape[1]))
    return changed


@settings(max_examples=50, deadline=None)
@given(st.lists(tokens, min_size=1, max_size=40), st.floats(0.5, 2.0), st.integers(0, 1000))
def test_repetition_penalty_is_that_of_transformers(history: list[int], penalty: float, seed: int) -> None:
    logits = random_logits(seed=seed)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([history]), logits.clone())[0]
    torch.testing.assert_close(edited(logits, SamplingParams(repetition_penalty=penalty), history, 1), expected)


@settings(max_examples=50, deadline=None)
@given(st.lists(tokens, min_size=1, max_size=40), st.data())
def test_presence_and_frequency_count_the_output_only(history: list[int], data: st.DataObject) -> None:
    prompt_length = data.draw(st.integers(1, len(history)))
    logits = random_logits()
    counts = torch.bincount(torch.tensor(history[prompt_length:], dtype=torch.int64), minlength=VOCAB)
    params = SamplingParams(presence_penalty=0.7, frequency_penalty=0.3)
    expected = logits[0] - 0.7 * (counts > 0) - 0.3 * counts
    torch.testing.assert_close(edited(logits, params, history, prompt_length), expected)


@pytest.mark.parametrize("num_output", [0, 2, 3, 4])
def test_min_tokens_masks_the_stop_tokens(num_output: int) -> None:
    history, stops = list(range(5 + num_output)), [7, 11]
    logits = random_logits()
    logits[0, stops] += 50
    expected = MinNewTokensLengthLogitsProcessor(5, 3, stops)(torch.tensor([history]), logits.clone())[0]
    params = SamplingParams(min_tokens=3, stop_token_ids=(7, 11))
    assert torch.equal(edited(logits, params, history, 5), expected)
    greedy = params.model_copy(update={"temperature": 0.0})
    assert (sample(logits, greedy, history, 5).token in stops) == (num_output >= 3)


@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 10}, {"min_p": 0.1}], ids=str)
def test_logit_bias_of_100_forces_and_of_minus_100_forbids(kind: dict[str, float]) -> None:
    logits = random_logits()
    likeliest = int(logits.argmax())
    for seed in range(50):
        assert sample(logits, SamplingParams(**kind, seed=seed, logit_bias={13: 100.0})).token == 13
        assert sample(logits, SamplingParams(**kind, seed=seed, logit_bias={likeliest: -100.0})).token != likeliest


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 2**64 - 1), st.floats(0.1, 5), st.sampled_from([1.0, 0.5]))
def test_top_k_of_one_is_greedy(seed: int, noise_seed: int, temperature: float, top_p: float) -> None:
    logits = random_logits(seed=seed)
    params = SamplingParams(temperature=temperature, top_k=1, top_p=top_p, seed=noise_seed)
    assert sample(logits, params).token == int(logits.argmax())
    nearly_zero = SamplingParams(temperature=temperature, top_p=1e-9, seed=noise_seed)
    assert sample(logits, nearly_zero).token == int(logits.argmax())
    only_the_best = SamplingParams(temperature=temperature, min_p=1.0, seed=noise_seed)
    assert sample(logits, only_the_best).token == int(logits.argmax())


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(top_k=1), SamplingParams(temperature=1e-9)], ids=str)
def test_equal_logits_go_to_the_lowest_id(params: SamplingParams) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [9, 4, 30]] = 2.5
    assert sample(logits, params).token == 4
    assert sample(-0.0 * logits, params).token == 0


@pytest.mark.parametrize("vocab", [50, 300, 2500])
@pytest.mark.parametrize("levels", [1, 3, 40])
def test_filters_break_ties_by_the_lowest_id(vocab: int, levels: int) -> None:
    """Only the first k of (-logit, id) may come out, whatever topk does with equal values."""
    logits = torch.randint(levels, (1, vocab), generator=torch.Generator().manual_seed(2)).float() / 10
    order = sorted(range(vocab), key=lambda token: (-float(logits[0, token]), token))
    rows = [SampleRow(SamplingParams(temperature=9.0, top_k=5, seed=n), [0], 1) for n in range(200)]
    assert {c.token for c in sampler(vocab).sample(logits.expand(200, -1), rows)} == set(order[:5])
    probabilities = torch.softmax(logits[0].double(), 0)[order]
    kept = order[: int((probabilities.cumsum(0) - probabilities < 0.0301).sum())]
    rows = [SampleRow(SamplingParams(top_p=0.0301, seed=n), [0], 1) for n in range(1000)]
    assert {c.token for c in sampler(vocab).sample(logits.expand(1000, -1), rows)} == set(kept)


def test_seeds_reproduce_and_differ() -> None:
    logits = torch.zeros(1, VOCAB)
    drawn = [sample(logits, SamplingParams(seed=seed)).token for seed in range(40)]
    assert drawn == [sample(logits, SamplingParams(seed=seed)).token for seed in range(40)]
    assert len(set(drawn)) > 20
    assert len({sample(logits, SamplingParams(seed=1), [0] * n).token for n in range(1, 41)}) > 20


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 60), tokens, st.floats(0.0, 2.0))
def test_logprobs_are_those_of_the_raw_logits(seed: int, num_top: int, banned: int, temperature: float) -> None:
    logits = random_logits(seed=seed)
    params = SamplingParams(temperature=temperature, logprobs=num_top, logit_bias={banned: -100.0}, top_p=0.9)
    choice = sample(logits, params)
    assert choice.logprob is not None
    expected = torch.log_softmax(logits[0].double(), -1)
    assert choice.logprob.token == choice.token
    assert math.isclose(choice.logprob.logprob, expected[choice.token], abs_tol=1e-6)
    assert choice.logprob.rank == 1 + int((expected > expected[choice.token]).sum())
    order = expected.argsort(descending=True, stable=True)[:num_top].tolist()
    assert [token for token, _ in choice.logprob.top] == order
    for token, logprob in choice.logprob.top:
        assert math.isclose(logprob, expected[token], abs_tol=1e-6)


def test_impossible_tokens_score_a_finite_floor() -> None:
    logits = torch.full((2, 4), -torch.inf)
    logits[:, 2] = 1.0
    scored = sampler(4).score(logits, [0, 2], [4, 0])
    assert [one.logprob for one in scored] == [-9999.0, 0.0]
    assert scored[0].top == [(2, 0.0), (0, -9999.0), (1, -9999.0), (3, -9999.0)]
    assert [one.rank for one in scored] == [2, 1]
    json.dumps([one.model_dump() for one in scored], allow_nan=False)


BAD = {"nan": math.nan, "negative nan": -math.nan, "inf": math.inf}


@pytest.mark.parametrize("places", [[20], range(20, 45)], ids=["one", "more than are shortlisted"])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", [GREEDY, SamplingParams(), SamplingParams(top_k=9), SamplingParams(top_p=0.9)], ids=str)
def test_a_row_with_bad_logits_is_marked_and_the_others_are_sound(
    kind: SamplingParams, bad: str, places: Sequence[int]
) -> None:
    params = kind.model_copy(update={"logprobs": 2})
    logits = random_logits(3)
    sound = sampler().sample(logits, [SampleRow(params, [0], 1)] * 3)
    logits[1, list(places)] = BAD[bad]
    found = sampler().sample(logits, [SampleRow(params, [0], 1)] * 3)
    assert (found[0], found[2]) == (sound[0], sound[2])
    assert found[1].error is not None
    assert "not finite" in found[1].error
    assert (found[1].token, found[1].logprob) == (0, None)
    json.dumps([one.model_dump() for one in sampler().score(logits, [1, 20, 3], 5)], allow_nan=False)


@pytest.mark.parametrize("kind", [GREEDY, SamplingParams(), SamplingParams(top_k=9), SamplingParams(top_p=0.9)], ids=str)
def test_a_row_with_every_token_masked_is_marked(kind: SamplingParams) -> None:
    params = kind.model_copy(update={"min_tokens": 1, "stop_token_ids": tuple(range(VOCAB))})
    error = sample(random_logits(), params).error
    assert error is not None
    assert "every logit is -inf" in error


def test_nothing_to_do_is_nothing() -> None:
    assert sampler().sample(torch.empty(0, VOCAB), []) == []
    assert sampler().score(torch.empty(0, VOCAB), [], 3) == []


def test_a_large_vocabulary_widens_its_search_for_the_nucleus() -> None:
    """A flat row needs nearly all of 5,000 tokens; one in the same batch needs two."""
    flat, sharp = torch.zeros(1, 5000), torch.zeros(1, 5000)
    sharp[0, [70, 71]] = 30.0
    rows = [SampleRow(SamplingParams(top_p=0.9, seed=n), [0], 1) for n in range(600)]
    found = [c.token for c in sampler(5000).sample(torch.cat([flat, sharp]).repeat(300, 1), rows)]
    assert set(found[1::2]) == {70, 71}
    assert max(found[::2]) < 4500
    assert max(found[::2]) > 4400
