"""Every family computes what transformers computes, whatever the schedule of chunks and decode steps."""

from __future__ import annotations

import random

import pytest
import torch

from placement.layout.layout import Layout
from tests.support.long_cases import long
from tests.support.models.tiny_decoder import SHUFFLED, Pages, Schedule, chunked, mixed, run, whole
from tests.support.models.tiny_models import FAMILIES, TinyModel, tiny

TOLERANCE = 1e-4
ONE = Layout()

torch.set_num_threads(1)


def sequences_of(*lengths: int, vocab: int = 101, seed: int = 3) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


def check(model: TinyModel, sequences: list[list[int]], schedule: Schedule, pages: Pages = SHUFFLED) -> None:
    for tokens, logits in zip(sequences, run(model, ONE, sequences, schedule, pages), strict=True):
        torch.testing.assert_close(logits, model.logits(tokens), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tied: bool) -> None:
    sequences = sequences_of(1, 2, 7, 16, 33, 61)
    check(tiny(family, tied=tied), sequences, whole(sequences))


@pytest.mark.parametrize("size", [3, *long(1, 7, 16)])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_decode_steps_equal_transformers(family: str, size: int) -> None:
    sequences = sequences_of(9, 20, 37)
    check(tiny(family), sequences, chunked(sequences, size, decode=6))


@pytest.mark.parametrize("consecutive", [False, *long(True)])
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_equal_transformers(family: str, consecutive: bool) -> None:
    sequences = sequences_of(1, 5, 17, 40, 29)
    for seed in range(3):
        check(tiny(family), sequences, mixed(sequences, seed), Pages(consecutive=consecutive))


def test_long_decode_rows_are_bucketed_and_read_in_place() -> None:
    model = tiny("llama2", max_position_embeddings=1024, num_hidden_layers=2)
    sequences = sequences_of(600, 300, 130, 40, 3)
    for consecutive in (False, True):
        check(model, sequences, chunked(sequences, 256, decode=2), Pages(16, consecutive))


PROMPTS = (7, 8, 9, 15, 16, 17, 40)


@pytest.mark.parametrize("size", [3, 8, 9, 16, 1000])
@pytest.mark.parametrize("family", ["qwen2_alternating", "mistral"])
def test_windows_do_not_depend_on_the_chunk_size(family: str, size: int) -> None:
    sequences = sequences_of(*(prompt + 24 for prompt in PROMPTS))
    check(tiny(family), sequences, chunked(sequences, size, decode=24))


def test_a_window_wider_than_a_query_block() -> None:
    model = tiny("mistral", sliding_window=40, num_hidden_layers=2, max_position_embeddings=1024)
    sequences = sequences_of(350)
    for size in (1000, 200, 64):
        check(model, sequences, chunked(sequences, size, decode=3))


@pytest.mark.parametrize("size", [7, 16, 1000])
@pytest.mark.parametrize("rope", ["yarn", "linear", "llama3"])
def test_stretched_positions_equal_transformers(rope: str, size: int) -> None:
    sequences = sequences_of(20, 33, 64, 100)
    check(tiny("llama2", rope=rope), sequences, chunked(sequences, size, decode=2))


class SharedPrefix(Pages):
    """The second sequence finds its first three blocks (12 tokens) in the first one's cache."""

    def tables(self, sequences: list[list[int]]) -> list[list[int]]:
        first, second = super().tables(sequences)
        return [first, first[:3] + second[3:]]


@pytest.mark.parametrize("size", [1, 3, 9, 1000])
@pytest.mark.parametrize("family", ["qwen2_alternating", "mistral", "llama2"])
def test_a_prefix_hit_in_the_middle_of_a_window(family: str, size: int) -> None:
    first, second = sequences_of(30, 45)
    second[:12] = first[:12]
    hit = [[(1, start, min(size, 45 - start))] for start in range(12, 45, size)]
    _, logits = run(tiny(family), ONE, [first, second], [[(0, 0, 30)], *hit], SharedPrefix())
    torch.testing.assert_close(logits, tiny(family).logits(second)[12:], atol=TOLERANCE, rtol=TOLERANCE)
