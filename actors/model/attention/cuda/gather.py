"""Attention with `scaled_dot_product_attention` over gathered pages, for any device and dtype, without other packages.

It is slow (one call a sequence, and a copy of its keys in each layer), but it runs where no paged kernel does: fp32 on CUDA,
old devices, or a machine without flash-attention packages.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from actors.model.attention.backend import with_sinks
from actors.model.attention.eager import eager_attention
from actors.model.attention.params import AttentionParams
from actors.model.kv.kv_cache import KVCache
from actors.model.kv.pages import source
from actors.model.step.batch import Batch


class GatherAttention:
    """The fallback `AttentionBackend`; its plan is the batch itself."""

    name = "torch SDPA over gathered pages"

    def prepare(self, batch: Batch, cache: KVCache) -> Batch:
        """See `AttentionBackend.prepare`."""
        return batch

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache,
        plan: Batch,
        params: AttentionParams,
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        cache.write(params.layer, plan.slots, k, v)
        out = q.new_empty(*q.shape[:2], v.shape[2])
        window, token = params.window, 0
        for queries, context, table in zip(plan.query_lens, plan.context_lens, plan.block_tables, strict=True):
            total = context + queries
            first = 0 if window is None else max(0, context - window + 1)
            keys, values = source(cache, table, first, total).read(cache, params.layer)
            rows = slice(token, token + queries)
            visible = _visible(range(context, total), range(first, total), window, cache.device)
            one = _attend(q[rows].transpose(0, 1).unsqueeze(0), keys, values, visible, params)
            out[rows] = one.squeeze(0).transpose(0, 1)
            token += queries
        return out


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, params: AttentionParams) -> Tensor:
    if params.softcap is None and params.sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=params.scale, enable_gqa=True)
    mask = torch.zeros(visible.shape, device=q.device).masked_fill_(~visible, -torch.inf)[None, None]
    out, lse = eager_attention(q, k, v, params.scale, mask=mask, softcap=params.softcap)
    return out if params.sinks is None else with_sinks(out, lse, params.sinks[:, None])


def _visible(queries: range, keys: range, window: int | None, device: torch.device) -> Tensor:
    """Return a mask [queries, keys] bool of the positions that each query sees."""
    at = torch.arange(queries.start, queries.stop, device=device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=device)
    seen = key <= at
    return seen if window is None else seen & (key > at - window)
