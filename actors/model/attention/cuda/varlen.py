"""Paged attention on CUDA with a flash-attention kernel: one call a layer for prefill chunks and decode rows together.

Four packages provide such a kernel, with different signatures; an adapter (`VarlenKernel`) hides the difference. All of them
align causal masks to the bottom right (the end of the sequence), take a window as (tokens before, tokens after), and read K and
V through a block table from pages ``[num_blocks, block_size, kv_heads, head_dim]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from actors.model.attention.params import AttentionParams
from actors.model.kv.kv_cache import KVCache
from actors.model.step.batch import Batch


@dataclass(frozen=True)
class VarlenPlan:
    """One step for a variable-length kernel; tensors are int32 on the device."""

    slots: Tensor
    query_starts: Tensor
    """[sequences + 1]: cumulative query lengths."""
    key_starts: Tensor
    """[sequences + 1]: cumulative `key_lens`."""
    key_lens: Tensor
    """[sequences]: lengths of context and chunk together."""
    longest_query: int
    longest_keys: int
    block_tables: Tensor
    """[sequences, longest table], padded with block 0."""


VarlenKernel = Callable[[Tensor, Tensor, Tensor, VarlenPlan, AttentionParams], Tensor]
"""(q, key pages, value pages, plan, params) -> [tokens, q_heads, head_dim]."""


class VarlenAttention:
    """The `AttentionBackend` on top of one variable-length kernel."""

    def __init__(self, name: str, kernel: VarlenKernel) -> None:
        self.name = name
        self._kernel = kernel

    def prepare(self, batch: Batch, cache: KVCache) -> VarlenPlan:
        """See `AttentionBackend.prepare`."""
        key_lens = [context + queries for context, queries in zip(batch.context_lens, batch.query_lens, strict=True)]
        longest = max(map(len, batch.block_tables), default=0)
        tables = [[*table, *[0] * (longest - len(table))] for table in batch.block_tables]
        return VarlenPlan(
            slots=batch.slots,
            query_starts=_int32([0, *accumulate(batch.query_lens)], cache.device),
            key_starts=_int32([0, *accumulate(key_lens)], cache.device),
            key_lens=_int32(key_lens, cache.device),
            longest_query=max(batch.query_lens, default=0),
            longest_keys=max(key_lens, default=0),
            block_tables=_int32(tables, cache.device),
        )

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache,
        plan: VarlenPlan,
        params: AttentionParams,
    ) -> Tensor:
        """See `AttentionBackend.attend`. `params` must have no sinks."""
        assert params.sinks is None, "choose_cuda gives models with sinks another backend"
        if q.shape[0] == 0:
            return q
        cache.write(params.layer, plan.slots, k, v)
        return self._kernel(q, *cache.paged_views(params.layer), plan, params)


def flash_attn_kernel(function: Callable[..., Any]) -> VarlenKernel:
    """Return ``flash_attn_varlen_func`` of flash-attn 2.5+ or of the stand-alone vllm-flash-attn 2.6, `function`, as a
    `VarlenKernel`."""

    def run(q: Tensor, keys: Tensor, values: Tensor, plan: VarlenPlan, params: AttentionParams) -> Tensor:
        out: Tensor = function(
            q,
            keys,
            values,
            cu_seqlens_q=plan.query_starts,
            cu_seqlens_k=plan.key_starts,
            max_seqlen_q=plan.longest_query,
            max_seqlen_k=plan.longest_keys,
            softmax_scale=params.scale,
            causal=True,
            window_size=_window(params),
            block_table=plan.block_tables,
            **_cap(params),
        )
        return out

    return run


def vllm_kernel(function: Callable[..., Any]) -> VarlenKernel:
    """Return ``flash_attn_varlen_func`` as vendored in vLLM, `function`, as a `VarlenKernel`. With a block table it takes key
    lengths, not cumulative ones."""

    def run(q: Tensor, keys: Tensor, values: Tensor, plan: VarlenPlan, params: AttentionParams) -> Tensor:
        out: Tensor = function(
            q,
            keys,
            values,
            cu_seqlens_q=plan.query_starts,
            seqused_k=plan.key_lens,
            max_seqlen_q=plan.longest_query,
            max_seqlen_k=plan.longest_keys,
            softmax_scale=params.scale,
            causal=True,
            window_size=_window(params),
            block_table=plan.block_tables,
            **_cap(params),
        )
        return out

    return run


def torch_kernel(function: Callable[..., Any]) -> VarlenKernel:
    """Return ``torch.nn.attention.varlen.varlen_attn``, `function`, as a `VarlenKernel` that reads pages through a block table;
    a window of (-1, 0) makes it causal."""

    def run(q: Tensor, keys: Tensor, values: Tensor, plan: VarlenPlan, params: AttentionParams) -> Tensor:
        out: Tensor = function(
            q,
            keys,
            values,
            plan.query_starts,
            plan.key_starts,
            plan.longest_query,
            plan.longest_keys,
            scale=params.scale,
            window_size=_window(params),
            enable_gqa=True,
            seqused_k=plan.key_lens,
            block_table=plan.block_tables,
            **_cap(params),
        )
        return out

    return run


def _window(params: AttentionParams) -> tuple[int, int]:
    """Return the window as (tokens before a query, tokens after it), excluding the query's own position; -1 means all."""
    return (-1 if params.window is None else params.window - 1, 0)


def _cap(params: AttentionParams) -> dict[str, float]:
    """Return the softcap argument, only if the model has one: not every kernel accepts it (`choose_cuda` selects one that
    does)."""
    return {} if params.softcap is None else {"softcap": params.softcap}


def _int32(values: list[Any], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
