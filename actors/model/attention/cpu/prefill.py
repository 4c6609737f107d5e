"""Prefill attention on CPU (chunks of several queries of one sequence), without a mask wherever possible.

    keys:     context (cached)         this chunk
            [ . . . . . . . . . ]   [ .             ]
            [ . . . . . . . . . ]   [ . .           ]      whole rectangle: no mask        )  merged by
            [ . . . . . . . . . ]   [ . . .         ]      square triangle: causal kernel  )  log-sum-exp

Queries from position ``window`` on do not see every earlier key. They are computed in blocks of `_QUERY_BLOCK`, each over the
band of keys it can see, under an additive mask. That bounds memory by ``_QUERY_BLOCK * (window + _QUERY_BLOCK)`` scores, and
the mask is the same for every block of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.model.attention.backend import with_sinks
from actors.model.attention.cpu.flash import flash, flash_with_lse
from actors.model.attention.merge import merge
from actors.model.attention.params import AttentionParams
from actors.model.kv.kv_cache import KVCache
from actors.model.kv.pages import Source, source
from actors.model.step.batch import Batch

_QUERY_BLOCK = 128


@dataclass(frozen=True)
class WholeChunk:
    """Queries that see the whole context and their chunk up to their own position; `context` is None if nothing is cached."""

    rows: slice
    context: Source | None

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache,
        params: AttentionParams,
    ) -> Tensor:
        """Attend from `q` [queries, q_heads, dim] to the cached context and causally to the chunk itself, `k` and `v` [queries,
        kv_heads, dim]. Returns [queries, q_heads, dim of v]."""
        q, k, v = (_heads_first(x) for x in (q, k, v))
        scale, softcap = params.scale, params.softcap
        sinks = None if params.sinks is None else params.sinks[:, None]
        if self.context is None:
            return _tokens_first(flash(q, k, v, scale, causal=True, softcap=softcap, sinks=sinks))
        chunk = flash_with_lse(q, k, v, scale, causal=True, softcap=softcap)
        context = flash_with_lse(q, *self.context.read(cache, params.layer), scale, softcap=softcap)
        out, lse = merge((context, chunk))
        return _tokens_first(out if sinks is None else with_sinks(out, lse, sinks))


@dataclass(frozen=True)
class WindowBlock:
    """Queries whose window excludes some keys, over the band of keys that any of them sees. `mask` is [1, 1, queries, keys]."""

    rows: slice
    band: Source
    mask: Tensor

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache,
        params: AttentionParams,
    ) -> Tensor:
        """Attend from `q` [queries, q_heads, dim] to the band of cached keys, in the layer of `params`. Returns [queries,
        q_heads, dim of v]. `k` and `v` are unused: they are in the cache already."""
        keys, values = self.band.read(cache, params.layer)
        sinks = None if params.sinks is None else params.sinks[:, None]
        out = flash(_heads_first(q), keys, values, params.scale, mask=self.mask, softcap=params.softcap, sinks=sinks)
        return _tokens_first(out)


def plan_prefill(batch: Batch, cache: KVCache, window: int | None) -> Iterator[WholeChunk | WindowBlock]:
    """Yield kernel calls that together cover every sequence of `batch` with more than one query token, under the sliding
    `window` (tokens; None: all)."""
    token = 0
    for queries, context, table in zip(batch.query_lens, batch.context_lens, batch.block_tables, strict=True):
        if queries > 1:
            free = queries if window is None else min(max(window - context, 0), queries)
            if free:
                cached = source(cache, table, 0, context) if context else None
                yield WholeChunk(slice(token, token + free), cached)
            for start in range(free, queries, _QUERY_BLOCK):
                stop = min(start + _QUERY_BLOCK, queries)
                assert window is not None
                band = source(cache, table, context + start - window + 1, context + stop)
                yield WindowBlock(slice(token + start, token + stop), band, _band_mask(stop - start, window, cache.device))
        token += queries


def _band_mask(queries: int, window: int, device: torch.device) -> Tensor:
    """Return the mask of a band, in which query i sees the keys ``[i, i + window)``."""
    ahead = torch.arange(queries + window - 1, device=device) - torch.arange(queries, device=device)[:, None]
    visible = (ahead >= 0) & (ahead < window)
    return torch.zeros(visible.shape, device=device).masked_fill_(~visible, -torch.inf)[None, None]


def _heads_first(x: Tensor) -> Tensor:
    """Return [tokens, heads, dim] as a view [1, heads, tokens, dim]."""
    return x.transpose(0, 1).unsqueeze(0)


def _tokens_first(x: Tensor) -> Tensor:
    """Return [1, heads, tokens, dim] as a view [tokens, heads, dim]."""
    return x.squeeze(0).transpose(0, 1)
