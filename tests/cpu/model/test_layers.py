"""Single layers: matrix products in every dtype and row count, vocabulary shards, parameters that hold nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from actors.groups.group import Group
from actors.groups.solo import SoloGroup
from actors.groups.thread import run_ranks, thread_groups
from actors.model.kernels import linear as kernels
from actors.model.kernels.linear import linear
from actors.model.layers.layers import RMSNorm, RowParallel, VocabularyEmbedding, VocabularyHead
from actors.model.step.regions import Regions

torch.set_num_threads(1)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape).to(dtype), requires_grad=False)


@pytest.mark.parametrize("has_bfloat16", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 7, 8, 9, 33, 70])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 8e-3), (torch.float16, 2e-3)])
def test_linear_equals_the_product(
    dtype: torch.dtype, tolerance: float, rows: int, bias: bool, has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_HAS_BFLOAT16", has_bfloat16)
    torch.manual_seed(rows)
    x, weight, shift = torch.randn(rows, 48).to(dtype), torch.randn(37, 48).to(dtype) / 7, torch.randn(37).to(dtype)
    out = linear(x, weight, shift if bias else None)
    exact = F.linear(x.double(), weight.double(), shift.double() if bias else None)
    assert out.dtype == dtype
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), exact, atol=tolerance * 2, rtol=tolerance)


@pytest.mark.parametrize("rows", range(1, 9))
def test_a_row_of_fp32_has_the_same_bits_whatever_rides_along(rows: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(8, 33), torch.randn(101, 33)
    assert torch.equal(linear(x[:rows], weight), linear(x, weight)[:rows])


def test_a_rank_without_columns_adds_nothing() -> None:
    layer = RowParallel(parameter(5, 0), parameter(5))
    region = Regions(SoloGroup("tp"), None).of([2])
    assert torch.equal(layer(torch.zeros(2, 0), region), layer.bias.expand(2, 5))


@pytest.mark.parametrize("scatter_from", [None, 0])
def test_a_row_parallel_bias_is_added_once(scatter_from: int | None) -> None:
    weight, bias, x = parameter(5, 6), parameter(5), torch.randn(3, 6)

    def rank(group: Group) -> torch.Tensor:
        mine, region = slice(group.rank * 3, group.rank * 3 + 3), Regions(group, scatter_from).of([3])
        return region.gather(RowParallel(nn.Parameter(weight[:, mine], False), bias)(x[:, mine], region))

    for whole in run_ranks(thread_groups(2, "tp"), rank):
        torch.testing.assert_close(whole, F.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_computed_in_fp32(dtype: torch.dtype) -> None:
    x, norm = (torch.randn(4, 576) * 300).to(dtype), RMSNorm(parameter(576, dtype=dtype), 1e-5)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    assert norm(x).dtype == dtype
    torch.testing.assert_close(norm(x).double(), exact, atol=1e-5, rtol=1e-5 if dtype is torch.float32 else 8e-3)


def test_shards_of_the_vocabulary_embed_every_id() -> None:
    table, ids = parameter(12, 8), torch.tensor([0, 9, 5, 11, 6])
    shards = [range(0, 6), range(6, 12)]

    def rank(group: Group) -> torch.Tensor:
        embedding = VocabularyEmbedding(nn.Parameter(table[shards[group.rank]], False), shards[group.rank])
        return embedding(ids, None, Regions(group, None).of([5]))

    joined = run_ranks(thread_groups(2, "tp"), rank)
    assert all(torch.equal(rows, table[ids]) for rows in joined)


@pytest.mark.parametrize(("vocab", "real"), [(range(0, 4), 4), (range(4, 12), 3), (range(12, 16), 0)])
def test_ids_past_the_vocabulary_cannot_be_chosen(vocab: range, real: int) -> None:
    logits = VocabularyHead(parameter(len(vocab), 8, dtype=torch.bfloat16), vocab, 7)(torch.randn(3, 8).bfloat16())
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits[:, :real]).all()
    assert torch.isneginf(logits[:, real:]).all()
