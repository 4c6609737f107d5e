"""Attention of one block of queries on CPU: the only caller of torch's flash-attention operator.

The operator checks almost nothing (torch 2.13), so this module does:

- no queries or no keys: it kills the process (SIGFPE)            -> answered here, LSE -inf
- query heads not a multiple of KV heads: garbage, or SIGFPE      -> refused
- k's batch, or v's shape, unlike q's: reads out of bounds        -> refused; shorter values are padded with zeros
- causal with unequal lengths: aligned to the wrong (left) corner -> refused
- a row that sees nothing: output 0 but LSE 0, which merges as if it had weight -> LSE -inf

The operator cannot cap scores either: `softcap` is handled by `actors.model.attention.capped`, under the same checks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from actors.model.attention.backend import with_sinks
from actors.model.attention.capped import capped_attention


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention. Returns [batch, q_heads, queries, dim of v], in q's memory order; rows that see no key are 0.

    `q` is [batch, q_heads, queries, dim]; `k` is [batch, kv_heads, keys, dim], where kv_heads divides q_heads; `v` is like `k`,
    or shorter in its last dimension. `scale` multiplies the scores; `mask` is added to them: fp32, broadcast to [batch, 1,
    queries, keys]. `softcap` and `sinks` are those of `AttentionParams`; `sinks` is [q_heads, 1] or [q_heads, queries]. Raises
    `ValueError` if shapes or dtypes clash, or with `causal` and unlike numbers of queries and keys.
    """
    if sinks is not None:
        return with_sinks(*flash_with_lse(q, k, v, scale, causal=causal, mask=mask, softcap=softcap), sinks)
    return _run(q, k, v, scale, causal, mask, softcap)[0]


def flash_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention. Returns the output [batch, q_heads, queries, dim of v] and its log-sum-exp [batch, q_heads, queries]
    fp32.

    The arguments and errors are those of `flash`. The log-sum-exp is a natural logarithm and includes the scale. It is -inf for
    rows that see no key.
    """
    out, lse = _run(q, k, v, scale, causal, mask, softcap)
    if mask is not None:
        lse = lse.masked_fill(torch.isneginf(mask).all(-1), -torch.inf)
    return out, lse


def _run(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    _check(q, k, v, causal)
    if v.shape[3] < q.shape[3]:
        out, lse = _run(q, k, F.pad(v, (0, q.shape[3] - v.shape[3])), scale, causal, mask, softcap)
        return out[..., : v.shape[3]], lse
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
    if softcap is not None:
        return capped_attention(q, k, v, scale, softcap, causal, mask)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return out, lse


def _check(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    batch, q_heads, queries, dim = q.shape
    kv_heads = k.shape[1]
    alike = k.shape[:3] == v.shape[:3] and v.shape[3] <= dim and q.dtype == k.dtype == v.dtype
    if not alike or k.shape[0] != batch or k.shape[3] != dim:
        raise ValueError(
            f"attention inputs clash: q {list(q.shape)} {q.dtype}, k {list(k.shape)} {k.dtype}, v {list(v.shape)} {v.dtype}; "
            "k and v must be alike (v may have shorter heads) and share q's batch, head size and dtype"
        )
    if kv_heads == 0 or q_heads % kv_heads:
        raise ValueError(f"the number of query heads ({q_heads}) must be a multiple of the number of KV heads ({kv_heads})")
    if causal and queries != k.shape[2]:
        raise ValueError(f"causal attention needs as many keys as queries, not {k.shape[2]} keys for {queries} queries")
