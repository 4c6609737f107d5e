"""Attention with capped scores: a partial result with its log-sum-exp, like the flash kernel's, in blocks of queries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from actors.model.attention import capped as attention_capped
from actors.model.attention.capped import capped_attention
from actors.model.attention.cpu.flash import flash_with_lse
from actors.model.attention.merge import merge

torch.set_num_threads(1)

INF = float("inf")


def qkv(queries: int, keys: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(batch, 6, queries, 8), torch.randn(batch, 2, keys, 8), torch.randn(batch, 2, keys, 8)


@pytest.mark.parametrize("causal", [False, True])
def test_a_huge_cap_is_none(causal: bool) -> None:
    q, k, v = qkv(9, 9)
    for ours, theirs in zip(
        capped_attention(q, k, v, 0.3, 1e4, causal), flash_with_lse(q, k, v, 0.3, causal=causal), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("most", [1, 50, 300])
@pytest.mark.parametrize("causal", [False, True])
def test_the_size_of_a_block_of_queries_changes_nothing(most: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(13, 13)
    mask = torch.zeros(1, 1, 13, 13).masked_fill_(torch.rand(13, 13) < 0.3, -INF)
    whole = capped_attention(q, k, v, 0.3, 0.7, causal, mask)
    monkeypatch.setattr(attention_capped, "_MOST_SCORES", most)
    for blocks, one in zip(capped_attention(q, k, v, 0.3, 0.7, causal, mask), whole, strict=True):
        torch.testing.assert_close(blocks, one, atol=1e-6, rtol=1e-6)


def test_scores_at_once_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    scores = attention_capped._scores

    def watched(*parts: object) -> Tensor:
        made = scores(*parts)
        seen.append(made.numel())
        return made

    monkeypatch.setattr(attention_capped, "_scores", watched)
    monkeypatch.setattr(attention_capped, "_MOST_SCORES", 4096)
    capped_attention(*qkv(200, 200, batch=1), 0.3, 0.7, causal=True)
    assert max(seen) <= 4096
    assert len(seen) > 10


@pytest.mark.parametrize("cut", [0, 1, 5, 11])
def test_parts_merge_to_the_whole(cut: int) -> None:
    q, k, v = qkv(4, 11)
    parts = [
        flash_with_lse(q, k[:, :, :cut], v[:, :, :cut], 0.3, softcap=0.7),
        flash_with_lse(q, k[:, :, cut:], v[:, :, cut:], 0.3, softcap=0.7),
    ]
    for joined, whole in zip(merge(parts), flash_with_lse(q, k, v, 0.3, softcap=0.7), strict=True):
        torch.testing.assert_close(joined, whole, atol=1e-6, rtol=1e-6)


def test_a_row_that_sees_nothing_has_no_weight() -> None:
    q, k, v = qkv(2, 3)
    mask = torch.tensor([[0.0, 0.0, 0.0], [-INF, -INF, -INF]])[None, None]
    out, lse = flash_with_lse(q, k, v, 1.0, mask=mask, softcap=2.0)
    assert torch.isneginf(lse[..., 1]).all()
    assert torch.isfinite(lse[..., 0]).all()
    assert not out[:, :, 1].any()


def test_bf16_goes_in_and_comes_out() -> None:
    q, k, v = (x.bfloat16() for x in qkv(5, 5))
    out, lse = capped_attention(q, k, v, 0.3, 0.7, causal=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(
        out.float(), capped_attention(q.float(), k.float(), v.float(), 0.3, 0.7, True)[0], atol=1e-2, rtol=1e-2
    )
