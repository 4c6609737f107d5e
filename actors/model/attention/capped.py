"""Eager attention with soft-capped scores (Gemma 2), which no torch kernel supports.

    scores = cap * tanh(q k * scale / cap) + mask,    out = softmax(scores) v

Queries are computed in blocks, so that at most `_MOST_SCORES` scores exist at once, however long the sequence is. A causal
block skips the keys behind its last query.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOST_SCORES = 1 << 22
"""16 MiB in fp32."""


def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention with scores bounded to ``cap * tanh(score / cap)``. Returns the output [batch, q_heads, queries, dim]
    and its LSE [batch, q_heads, queries] fp32.

    Rows that see no key have output 0 and LSE -inf. The other arguments are those of `actors.model.attention.cpu.flash.flash`,
    which has checked them; v has the shape of k. With `causal`, there are as many queries as keys.
    """
    batch, q_heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    groups = q.reshape(batch, kv_heads, q_heads // kv_heads, queries, dim)
    out = torch.empty_like(groups)
    lse = torch.empty(groups.shape[:-1], dtype=torch.float32, device=q.device)
    step = max(1, _MOST_SCORES // (batch * q_heads * keys))
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        seen = rows.stop if causal else keys
        scores = _scores(groups[:, :, :, rows], k[:, :, :seen], scale, cap)
        if causal:
            scores.masked_fill_(_later(rows, seen, q.device), -torch.inf)
        if mask is not None:
            scores += _part_of(mask, rows, seen).unsqueeze(2)
        out[:, :, :, rows], lse[:, :, :, rows] = _weigh(scores, v[:, :, :seen])
    return out.view(q.shape), lse.view(q.shape[:3])


def _scores(q: Tensor, k: Tensor, scale: float, cap: float) -> Tensor:
    """Return the capped scores [batch, kv_heads, group, queries, keys] fp32."""
    products = torch.matmul(q.to(torch.float32), k.to(torch.float32).transpose(-2, -1).unsqueeze(2))
    return products.mul_(scale / cap).tanh_().mul_(cap)


def _weigh(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    lse = scores.logsumexp(-1)
    top = lse.masked_fill(torch.isneginf(lse), 0)  # a row that sees nothing: exp(-inf - 0) is 0, exp(-inf + inf) is NaN
    weights = (scores - top.unsqueeze(-1)).exp_()
    return torch.matmul(weights, v.to(torch.float32).unsqueeze(2)).to(v.dtype), lse


def _later(rows: slice, keys: int, device: torch.device) -> Tensor:
    """Return a mask [queries, keys] bool that marks the keys behind each query."""
    return torch.arange(keys, device=device) > torch.arange(rows.start, rows.stop, device=device)[:, None]


def _part_of(mask: Tensor, rows: slice, keys: int) -> Tensor:
    """Return the part of a mask [batch or 1, 1, queries or 1, keys] that covers queries `rows` and the first `keys` keys."""
    return (mask if mask.shape[2] == 1 else mask[:, :, rows])[..., :keys]
