"""Attention sinks: one more score in every softmax, whatever kernel, chunk or merge the rest of it goes through."""

from __future__ import annotations

import pytest
import torch

from actors.model.attention.backend import with_sinks
from actors.model.attention.cpu.backend import CpuAttention
from actors.model.attention.cuda.gather import GatherAttention
from actors.model.attention_selection import choose
from placement.layout.layout import Layout
from tests.support.models.tiny_decoder import chunked, mixed, run, whole
from tests.support.models.tiny_models import tiny

torch.set_num_threads(1)

SEQUENCES = [[7 * at % 101 for at in range(length)] for length in (1, 6, 23, 40)]


@pytest.mark.parametrize("schedule", [whole(SEQUENCES), chunked(SEQUENCES, 5, decode=1), mixed(SEQUENCES, 4)], ids=len)
def test_gathered_pages_do_them_as_transformers(schedule: list[list[tuple[int, int, int]]]) -> None:
    model = tiny("gpt_oss")
    for make in (GatherAttention, CpuAttention):
        for tokens, logits in zip(SEQUENCES, run(model, Layout(), SEQUENCES, schedule, make_attention=make), strict=True):
            torch.testing.assert_close(logits, model.logits(tokens), atol=1e-4, rtol=1e-4)


def test_a_sink_is_a_further_key_of_value_nothing() -> None:
    scores, values, sinks = torch.randn(3, 5, 7), torch.randn(7, 4), torch.randn(3)
    out, lse = scores.softmax(-1) @ values, scores.logsumexp(-1)
    longer = torch.cat((scores, sinks[:, None, None].expand(3, 5, 1)), -1).softmax(-1)
    torch.testing.assert_close(with_sinks(out, lse, sinks[:, None]), longer[..., :-1] @ values)


def test_a_query_that_sees_nothing_stays_nothing() -> None:
    out = with_sinks(torch.zeros(1, 2), torch.full((1,), -torch.inf), torch.zeros(1))
    assert torch.equal(out, torch.zeros(1, 2))


def test_cuda_kernels_without_a_log_sum_exp_are_passed_over() -> None:
    assert choose("cuda", torch.bfloat16, sinks=True).name == GatherAttention.name
