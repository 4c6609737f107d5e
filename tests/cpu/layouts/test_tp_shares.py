"""Unequal shares of a tp group compute what one rank computes, whatever divides and whatever does not."""

from __future__ import annotations

import pytest
import torch

from placement.layout.layout import Layout
from placement.legality.check import check
from tests.support.models.tiny_decoder import mixed, run, whole
from tests.support.models.tiny_models import tiny

torch.set_num_threads(1)

SEQUENCES = [[(5 * index + 3 * at) % 101 for at in range(length)] for index, length in enumerate((1, 9, 20, 37))]
SCHEDULE = mixed(SEQUENCES, 1)


TWO, THREE, FIVE, STAGED = "tp=2,tp_shares=3/1", "tp=3,tp_shares=5/2/1", "tp=5,tp_shares=1/4/1/1/2", "tp=2,pp=2,tp_shares=1/3"


@pytest.mark.parametrize(
    ("family", "kv_heads", "text"),
    [
        *(("llama_biases", 2, text) for text in (TWO, THREE, FIVE, STAGED)),
        *(("qwen3", 2, text) for text in (TWO, THREE)),
        *(("qwen2_alternating", 6, text) for text in (THREE, FIVE)),
        *(("llama2", kv_heads, FIVE) for kv_heads in (1, 3)),
    ],
)
def test_shares_equal_one_rank(family: str, kv_heads: int, text: str) -> None:
    model, layout = tiny(family, tied=family == "qwen3", num_key_value_heads=kv_heads), Layout.parse(text)
    assert check(layout, model.spec) == []
    for logits, reference in zip(
        run(model, layout, SEQUENCES, SCHEDULE), run(model, Layout(), SEQUENCES, SCHEDULE), strict=True
    ):
        torch.testing.assert_close(logits, reference, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("text", ["tp=3,tp_shares=5/2/1", "tp=4,tp_shares=1/50/1/50"])
def test_a_prime_vocabulary_by_shares_loses_and_gains_no_id(text: str, tied: bool) -> None:
    model = tiny("llama2", tied=tied)
    for tokens, logits in zip(SEQUENCES, run(model, Layout.parse(text), SEQUENCES, whole(SEQUENCES)), strict=True):
        assert logits.shape[1] == 101
        torch.testing.assert_close(logits, model.logits(tokens), atol=1e-4, rtol=1e-4)


def test_equal_shares_give_the_bits_of_no_shares() -> None:
    model = tiny("llama2")
    equal, none = (run(model, Layout.parse(text), SEQUENCES, SCHEDULE) for text in ("tp=3,tp_shares=2/2/2", "tp=3"))
    assert all(map(torch.equal, equal, none))
