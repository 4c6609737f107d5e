"""Context parallelism computes what one rank computes: cp in both styles, dcp, with tp and pp, whatever the schedule."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from torch import Tensor

from actors.engine.config.engine_config import EngineConfig
from actors.wire.requests import GenerateRequest, SamplingParams, TokenEvent
from placement.layout.layout import Layout
from tests.support.inprocess import in_process
from tests.support.long_cases import long
from tests.support.models.tiny_decoder import Schedule, chunked, mixed, whole
from tests.support.models.tiny_models import TinyModel, tiny
from tests.support.plan_driver import driver

torch.set_num_threads(1)

CP = ["cp=2", "cp=4", "cp=3,cp_style=allgather"]
DCP = ["tp=4,dcp=2", "tp=6,dcp=3"]
"""The tiny models have 6 query heads in 2 KV groups: tp=4 puts 2 and 1 query heads on the 2 ranks of a dcp group."""
PRODUCTS = ["cp=3,tp=2,pp=2", "cp=2,tp=4,dcp=2", "cp=2,tp=2,sp=true,cp_style=allgather"]


def sequences_of(*lengths: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(101) for _ in range(length)] for length in lengths]


SEQUENCES = sequences_of(2, 5, 8, 29)
"""With cp=4 a row is split from 8 new tokens on."""
SCHEDULES: list[Schedule] = [whole(SEQUENCES), chunked(SEQUENCES, 7, decode=1), mixed(SEQUENCES, 3)]


def together(sequences: list[list[int]], size: int) -> Schedule:
    """All sequences at once, in chunks of `size`."""
    longest = max(map(len, sequences))
    return [
        [(index, start, min(size, len(tokens) - start)) for index, tokens in enumerate(sequences) if start < len(tokens)]
        for start in range(0, longest, size)
    ]


@cache
def reference(family: str, rope: str | None = None) -> list[Tensor]:
    with driver(tiny(family, rope=rope), Layout()) as one:
        return one.play(SEQUENCES, whole(SEQUENCES))


def check_layout(
    model: TinyModel, text: str, expected: list[Tensor], sequences: list[list[int]], schedules: list[Schedule]
) -> None:
    with driver(model, Layout.parse(text)) as ranks:
        for schedule in schedules:
            for found, right in zip(ranks.play(sequences, schedule), expected, strict=True):
                torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("text", CP + DCP + PRODUCTS)
def test_a_layout_equals_one_rank(text: str) -> None:
    check_layout(tiny("llama2"), text, reference("llama2"), SEQUENCES, SCHEDULES)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen2_alternating", "cp=3"),
        ("gemma2", "cp=2,cp_style=allgather"),
        ("gpt_oss", "tp=4,dcp=2"),
        ("qwen2_alternating", "tp=4,dcp=2"),
        ("gpt_oss", "cp=3"),
    ],
)
def test_windows_caps_and_norms(family: str, text: str) -> None:
    check_layout(tiny(family), text, reference(family), SEQUENCES, SCHEDULES[1:])


@pytest.mark.parametrize("text", ["cp=3", "cp=2,cp_style=allgather", *long("tp=8,dcp=2", "cp=2,tp=3,pp=2")])
def test_layers_of_unlike_heads(text: str) -> None:
    """Keys and values of unlike size; on 8 ranks a KV head is on 4 in the one kind of layer and on 2 in the other."""
    check_layout(tiny("mimo_v2"), text, reference("mimo_v2"), SEQUENCES, SCHEDULES)


@pytest.mark.parametrize(("q_heads", "kv_heads", "text"), [(4, 1, "tp=4,dcp=2"), (4, 1, "tp=4,dcp=4"), (9, 3, "tp=6,dcp=2")])
def test_other_heads(q_heads: int, kv_heads: int, text: str) -> None:
    """One KV head on four ranks, and SmolLM2's heads on six, with uneven query heads in a dcp group."""
    model = tiny("llama2", num_attention_heads=q_heads, num_key_value_heads=kv_heads, hidden_size=q_heads * 8)
    with driver(model, Layout()) as one:
        expected = one.play(SEQUENCES, whole(SEQUENCES))
    check_layout(model, text, expected, SEQUENCES, SCHEDULES[1:])


@pytest.mark.parametrize("rope", ["yarn", *long("linear", "llama3")])
def test_scaled_ropes_see_true_positions(rope: str) -> None:
    """Field report B07: original length 32, every split and chunk size."""
    model, sequences = tiny("llama2", rope=rope, num_hidden_layers=1), sequences_of(20, 33, 64, 100)
    schedules = [whole(sequences), together(sequences, 7), together(sequences, 16)]
    with driver(model, Layout()) as one:
        expected = one.play(sequences, whole(sequences))
    for text in ("cp=2", "cp=4", "cp=2,cp_style=allgather", "cp=4,cp_style=allgather"):
        check_layout(model, text, expected, sequences, schedules)


@pytest.mark.parametrize(("kv_heads", "text"), [(1, "cp=4"), (2, "cp=4,cp_style=allgather")])
def test_fewer_kv_heads_than_context_ranks(kv_heads: int, text: str) -> None:
    """Field report A10: 8 query heads and 1 or 2 KV heads on four context ranks."""
    model = tiny("llama2", num_attention_heads=8, num_key_value_heads=kv_heads, hidden_size=64)
    with driver(model, Layout()) as one:
        expected = one.play(SEQUENCES, whole(SEQUENCES))
    check_layout(model, text, expected, SEQUENCES, SCHEDULES[1:])


@pytest.mark.parametrize("text", ["cp=3", *long("cp=2,tp=4,dcp=2,cp_style=allgather")])
def test_the_same_layout_twice_gives_the_same_bits(text: str) -> None:
    runs = []
    for _ in range(2):
        with driver(tiny("qwen2_alternating"), Layout.parse(text)) as ranks:
            runs.append(ranks.play(SEQUENCES, SCHEDULES[2]))
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("text", ["cp=2", "tp=4,dcp=2"])
def test_bf16_is_within_its_rounding(text: str) -> None:
    """Error no more than twice that of one bf16 rank against fp32, plus 1e-2."""
    model, exact = tiny("llama2"), reference("llama2")
    errors = []
    for layout in (Layout(), Layout.parse(text)):
        with driver(model, layout, torch.bfloat16) as ranks:
            found = ranks.play(SEQUENCES, SCHEDULES[1])
        errors.append(max((a - b).abs().max().item() for a, b in zip(found, exact, strict=True)))
    assert errors[1] <= 2 * errors[0] + 1e-2


# Through the engine


def greedy(prompt: list[int], name: str, tokens: int = 12) -> GenerateRequest:
    sampling = SamplingParams(temperature=0, logprobs=0)
    return GenerateRequest(request_id=name, prompt=prompt, max_tokens=tokens, sampling=sampling)


def config(layout: str, blocks: int, **changes: int) -> EngineConfig:
    owners = Layout.parse(layout).kv_owners
    values = {"block_size": 4, "max_model_len": 400, "max_batch_tokens": 256, "max_sequences": 8, **changes}
    return EngineConfig(num_blocks=blocks, kv_owners=owners, **values)


def assert_equal(found: TokenEvent, expected: TokenEvent) -> None:
    assert (found.tokens, found.finish, found.error) == (expected.tokens, expected.finish, expected.error)
    for a, b in zip(found.logprobs, expected.logprobs, strict=True):
        assert abs(a.logprob - b.logprob) < 1e-4


@pytest.mark.parametrize(
    ("text", "chunk"), [("cp=2", 1024), *long(("tp=4,dcp=2", 7), ("cp=3,cp_style=allgather", 1024), ("cp=2,tp=4,dcp=2", 16))]
)
def test_prefix_hits_are_found_wherever_they_lie(text: str, chunk: int) -> None:
    """Hits longer and shorter than what follows, so that both keys and queries are exchanged, and inside a window."""
    model = tiny("qwen2_alternating")
    base, *tails = sequences_of(61, 1, 9, 40, 3)
    prompts = [base, *(base[:cut] + tail for cut, tail in zip((61, 30, 13, 61), tails, strict=True)), base]
    answers = {}
    for layout in ("", text):
        with in_process(model, layout, config(layout, 100, max_chunk_tokens=chunk)) as replica:
            answers[layout] = [replica.run(greedy(prompt, str(at))) for at, prompt in enumerate(prompts)]
    for found, expected in zip(answers[text], answers[""], strict=True):
        assert_equal(found, expected)
    assert [event.cached_tokens for event in answers[text]] == [0, 60, 28, 12, 60, 60]


@pytest.mark.parametrize("text", ["cp=2", "tp=4,dcp=2"])
def test_a_context_of_every_owners_pages_fits(text: str) -> None:
    """16 blocks of 4 tokens on each rank: 64 tokens a rank, and one sequence fills all of them."""
    model, owners = tiny("llama2"), Layout.parse(text).kv_owners
    (prompt,) = sequences_of(64 * owners - 9)
    with in_process(model, text, config(text, 16)) as replica:
        found = replica.run(greedy(prompt, "long", tokens=100))
        stats = replica.engine.stats()
    assert len(prompt) + len(found.tokens) == 64 * owners
    assert stats.total_blocks == 16 * owners
    with in_process(model, "", config("", 16 * owners)) as alone:
        assert_equal(found, alone.run(greedy(prompt, "long", tokens=100)))


@pytest.mark.parametrize("text", ["cp=3", *long("tp=4,dcp=2")])
def test_chunks_longer_and_shorter_than_a_window(text: str) -> None:
    """Field report B08: windows of 8, then decode until they have slid past the prompt."""
    model, prompts = tiny("qwen2_alternating"), sequences_of(7, 8, 9, 17, 40)
    with in_process(model, "", config("", 200)) as alone:
        expected = [alone.run(greedy(prompt, str(at), tokens=24)) for at, prompt in enumerate(prompts)]
    for chunk in (3, 9):
        with in_process(model, text, config(text, 100, max_chunk_tokens=chunk)) as replica:
            waiting = [replica.submit(greedy(prompt, str(at), tokens=24)) for at, prompt in enumerate(prompts)]
            for events, right in zip(waiting, expected, strict=True):
                assert_equal(replica.finish(events), right)
