"""Decode attention on CPU: rows of one query each, batched into buckets of similar length, with one kernel call a bucket.

A bucket is padded to its longest row. Rows are taken longest first; a row joins the bucket if its padding wastes at most a
quarter of the longest row, or no more than 64 tokens (about the cost of another kernel call), and if the bucket then has no
more than `GATHERED_TOKENS` tokens, which bounds the memory of the gathered pages::

    blocks of each row    [ 90 88 70 | 40 38 | 3 2 1 1 ]        three buckets

The pages of a bucket are gathered and its padding is masked with -inf. A bucket of one row whose blocks are consecutive is a
view of the cache; splitting larger buckets into such views was slower than the copy it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.model.attention.cpu.flash import flash, flash_with_lse
from actors.model.attention.cpu.paged import PagedDecode, token_rows
from actors.model.attention.decode_row import DecodeRow, decode_rows
from actors.model.attention.params import AttentionParams
from actors.model.kernels.native.library import library
from actors.model.kv.kv_cache import KVCache
from actors.model.kv.pages import Gather, Source, source
from actors.model.step.batch import Batch
from placement.cost.activations import GATHERED_TOKENS

LseKernel = Callable[..., tuple[Tensor, Tensor]]
"""A function with the signature of `flash_with_lse`."""

_WASTE = 0.25
_FREE_TOKENS = 64


@dataclass(frozen=True)
class DecodeBucket:
    """The rows of one kernel call. `mask` is [rows, 1, 1, keys] fp32: -inf where a row's keys are padding or outside its
    window."""

    rows: slice | Tensor
    keys: Source
    mask: Tensor | None

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache,
        params: AttentionParams,
    ) -> Tensor:
        """Attend from `q` [rows, q_heads, dim] to the cached keys of the bucket's rows, in the layer of `params`. Returns
        [rows, q_heads, dim of values]. `k` and `v` are unused: they are in the cache already."""
        keys, values = self.keys.read(cache, params.layer)
        rows, heads, dim = q.shape
        # The query heads of one KV head are passed as its "queries": half the time of one query a head, same result.
        grouped = q.view(rows, cache.kv_heads, heads // cache.kv_heads, dim)
        sinks = None if params.sinks is None else params.sinks.view(cache.kv_heads, -1)
        out = flash(grouped, keys, values, params.scale, mask=self.mask, softcap=params.softcap, sinks=sinks)
        return out.reshape(rows, heads, values.shape[3])

    def run_with_lse(
        self, q: Tensor, cache: KVCache, params: AttentionParams, kernel: LseKernel = flash_with_lse
    ) -> tuple[Tensor, Tensor]:
        """Attend from `q` [rows, q_heads, dim] to the cached keys of the bucket's rows, with a `kernel` that has the signature
        of `flash_with_lse`. Returns the output [rows, q_heads, dim of values] and the log-sum-exp [rows, q_heads] fp32."""
        keys, values = self.keys.read(cache, params.layer)
        rows, heads, dim = q.shape
        grouped = q.view(rows, cache.kv_heads, heads // cache.kv_heads, dim)
        out, lse = kernel(grouped, keys, values, params.scale, mask=self.mask, softcap=params.softcap)
        return out.reshape(rows, heads, values.shape[3]), lse.reshape(rows, heads)


def plan_decode(batch: Batch, cache: KVCache, window: int | None) -> Sequence[PagedDecode | DecodeBucket]:
    """Return kernel calls that together cover every sequence of `batch` with one query token, under the sliding `window`
    (tokens; None: all)."""
    return decode_tasks(list(decode_rows(batch, cache.block_size, window)), cache)


def decode_tasks(rows: Sequence[DecodeRow], cache: KVCache) -> Sequence[PagedDecode | DecodeBucket]:
    """Return kernel calls that together cover all `rows`, each of which must see at least one key in the pages of `cache`: one
    call of the compiled kernel, or buckets if there is none."""
    native = library(cache)
    if native is None or not rows:
        return bucketed(rows, cache)
    return [PagedDecode.of(rows, cache.device)]


def bucketed(rows: Iterable[DecodeRow], cache: KVCache) -> list[DecodeBucket]:
    """Return buckets of rows of similar length (one kernel call each) that together cover all `rows`, each of which must see at
    least one key in the pages of `cache`."""
    longest_first = sorted(rows, key=lambda row: -len(row.blocks))
    return [_merge_rows(bucket, cache) for bucket in _bucket(longest_first, cache.block_size)]


def _bucket(rows: list[DecodeRow], block_size: int) -> list[list[DecodeRow]]:
    """Group rows, longest first, by the waste rule above."""
    buckets: list[list[DecodeRow]] = []
    for row in rows:
        longest = len(buckets[-1][0].blocks) if buckets else 0
        padding = longest - len(row.blocks)
        is_close = padding <= _WASTE * longest or padding * block_size <= _FREE_TOKENS
        if buckets and is_close and (len(buckets[-1]) + 1) * longest * block_size <= GATHERED_TOKENS:
            buckets[-1].append(row)
        else:
            buckets.append([row])
    return buckets


def _merge_rows(bucket: list[DecodeRow], cache: KVCache) -> DecodeBucket:
    bucket.sort(key=lambda row: row.token)
    if len(bucket) == 1:
        row = bucket[0]
        return DecodeBucket(slice(row.token, row.token + 1), source(cache, row.blocks, row.first, row.stop), None)
    longest = max(len(row.blocks) for row in bucket)
    # Short rows are padded with their own last block: a NaN of another sequence would pass through a weight of 0.
    tables = [row.blocks + row.blocks[-1:] * (longest - len(row.blocks)) for row in bucket]
    keys = longest * cache.block_size
    return DecodeBucket(
        token_rows([row.token for row in bucket], cache.device),
        Gather(cache, tables, 0, keys),
        _mask(bucket, keys, cache.device),
    )


def _mask(bucket: list[DecodeRow], keys: int, device: torch.device) -> Tensor:
    at = torch.arange(keys, device=device)
    first = torch.tensor([[row.first] for row in bucket], device=device)
    stop = torch.tensor([[row.stop] for row in bucket], device=device)
    visible = (at >= first) & (at < stop)
    return torch.zeros(visible.shape, device=device).masked_fill_(~visible, -torch.inf)[:, None, None]
