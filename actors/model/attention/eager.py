"""Eager attention (matrix products) with its log-sum-exp, for any device, dtype and mask.

It is used where no kernel returns the log-sum-exp. The caller bounds the number of scores where there is a mask: masks are made
for few queries at a time (`actors.model.attention.context.mask_spans`). Without a mask queries are computed in blocks of at
most `_MOST_SCORES` scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOST_SCORES = 1 << 24
"""64 MiB in fp32."""


def eager_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention with matrix products, on any device. The arguments are those of
    `actors.model.attention.cpu.flash.flash`, but are not checked, and there must be at least one query.

    Returns the output [batch, q_heads, queries, dim of v] in q's dtype, and its LSE [batch, q_heads, queries] fp32; -inf for
    rows that see no key, whose output is 0.
    """
    batch, q_heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    grouped = q.reshape(batch, kv_heads, q_heads // kv_heads, queries, dim)
    step = queries if mask is not None else max(1, _MOST_SCORES // max(1, batch * q_heads * keys))
    parts = []
    for start in range(0, queries, step):
        scores = torch.matmul(grouped[:, :, :, start : start + step].float(), k.float().mT.unsqueeze(2)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if causal:
            at = torch.arange(start, start + scores.shape[3], device=q.device)[:, None]
            scores.masked_fill_(torch.arange(keys, device=q.device) > at, -torch.inf)
        if mask is not None:
            scores += mask.unsqueeze(2)
        lse = scores.logsumexp(-1)
        top = lse.masked_fill(torch.isneginf(lse), 0)  # exp(-inf - -inf) would be NaN
        parts.append((torch.matmul((scores - top.unsqueeze(-1)).exp_(), v.float().unsqueeze(2)), lse))
    outs, lses = zip(*parts, strict=True)
    out = torch.cat(outs, 3).view(*q.shape[:3], v.shape[3])
    return out.to(q.dtype), torch.cat(lses, 3).view(q.shape[:3])
