"""Partial attention on CUDA: a flash-attention kernel that returns the log-sum-exp, or else eager attention.

    vllm_flash_attn, flash_attn   flash_attn_varlen_func(..., return_attn_probs=True)     pages of 16, of 256
    vllm.vllm_flash_attn          flash_attn_varlen_func(..., return_softmax_lse=True)    pages of 16

The kernels take no mask, and head dimensions of at most 256. Masked blocks, decode rows whose window begins inside their pages,
and latents (`actors.model.latent`, absorbed) use eager attention (`eager.py`): they have few queries, few keys, or one KV head
for all.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from actors.model.attention.cpu.decode import DecodeBucket, bucketed
from actors.model.attention.cuda.choose import MOST_HEAD_DIM, Import
from actors.model.attention.decode_row import DecodeRow
from actors.model.attention.eager import eager_attention
from actors.model.attention.params import AttentionParams
from actors.model.attention.partial import PagedTask, PartialKernel
from actors.model.kv.kv_cache import KVCache


@dataclass(frozen=True)
class Lengths:
    """The sequences of one kernel call; tensors are int32 on the device. With `block_tables` keys are pages, otherwise they are
    concatenated."""

    queries: Tensor
    """[sequences + 1]: cumulative query lengths."""
    keys: Tensor
    """[sequences + 1]: cumulative key lengths."""
    key_lens: Tensor
    longest_query: int
    longest_keys: int
    block_tables: Tensor | None = None

    @classmethod
    def of(cls, queries: list[int], keys: list[int], device: torch.device, tables: list[list[int]] | None = None) -> Lengths:
        """Return the lengths, on `device`, from the number of queries and of keys of each sequence (at least one sequence).
        `tables` are their block tables, which are padded with block 0; None if keys are not paged."""
        query_sums, key_sums = (_int32([0, *accumulate(lens)], device) for lens in (queries, keys))
        blocks = None if tables is None else _int32([[*t, *[0] * (max(map(len, tables)) - len(t))] for t in tables], device)
        return cls(query_sums, key_sums, _int32(keys, device), max(queries), max(keys), blocks)


PartialAttention = Callable[[Tensor, Tensor, Tensor, Lengths, bool, AttentionParams], tuple[Tensor, Tensor]]
"""(q [tokens, q_heads, dim], keys, values, lengths, causal, params) -> (output like q, LSE [q_heads, tokens])."""


def flash_attn_part(function: Callable[..., Any]) -> PartialAttention:
    """Return ``flash_attn_varlen_func`` of flash-attn or of the stand-alone vllm-flash-attn, `function`, as a
    `PartialAttention`."""

    def run(
        q: Tensor, keys: Tensor, values: Tensor, lens: Lengths, causal: bool, params: AttentionParams
    ) -> tuple[Tensor, Tensor]:
        lengths = {"cu_seqlens_q": lens.queries, "cu_seqlens_k": lens.keys, "block_table": lens.block_tables}
        longest = {"max_seqlen_q": lens.longest_query, "max_seqlen_k": lens.longest_keys}
        cap = {} if params.softcap is None else {"softcap": params.softcap}
        found = function(
            q, keys, values, **lengths, **longest, softmax_scale=params.scale, causal=causal, return_attn_probs=True, **cap
        )
        return found[0], found[1]

    return run


def vllm_part(function: Callable[..., Any]) -> PartialAttention:
    """Return ``flash_attn_varlen_func`` as vendored in vLLM, `function`, as a `PartialAttention`. It takes key lengths with
    paged keys, and cumulative ones otherwise."""

    def run(
        q: Tensor, keys: Tensor, values: Tensor, lens: Lengths, causal: bool, params: AttentionParams
    ) -> tuple[Tensor, Tensor]:
        paged = lens.block_tables is not None
        lengths = {"cu_seqlens_q": lens.queries, "block_table": lens.block_tables}
        lengths |= {"seqused_k": lens.key_lens} if paged else {"cu_seqlens_k": lens.keys}
        longest = {"max_seqlen_q": lens.longest_query, "max_seqlen_k": lens.longest_keys}
        cap = {} if params.softcap is None else {"softcap": params.softcap}
        found = function(
            q, keys, values, **lengths, **longest, softmax_scale=params.scale, causal=causal, return_softmax_lse=True, **cap
        )
        return found[0], found[1]

    return run


_OFFERS = (
    ("vllm_flash_attn", 16, flash_attn_part, ("block_table", "return_attn_probs")),
    ("vllm.vllm_flash_attn", 16, vllm_part, ("seqused_k", "return_softmax_lse")),
    ("flash_attn", 256, flash_attn_part, ("block_table", "return_attn_probs")),
)
"""(module, page multiple, adapter, parameters that older versions lack)"""


class EagerPartial:
    """The `PartialKernel` without any package: eager attention for all calls."""

    name = "matrix products"

    def dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        params: AttentionParams,
        causal: bool = False,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `PartialKernel.dense`."""
        return eager_attention(q, k, v, params.scale, causal=causal, mask=mask, softcap=params.softcap)

    def decode(self, rows: Sequence[DecodeRow], cache: KVCache) -> Sequence[PagedTask]:
        """See `PartialKernel.decode`."""
        return [EagerBucket(bucket) for bucket in bucketed(rows, cache)]


class EagerBucket:
    """A bucket of decode rows computed by `eager_attention`."""

    def __init__(self, bucket: DecodeBucket) -> None:
        self.rows, self._bucket = bucket.rows, bucket

    def run_with_lse(self, q: Tensor, cache: KVCache, params: AttentionParams) -> tuple[Tensor, Tensor]:
        """See `PagedTask.run_with_lse`."""
        return self._bucket.run_with_lse(q, cache, params, eager_attention)


class FlashPartial(EagerPartial):
    """The kernel of one package. Masked blocks, and rows whose window begins inside their pages, use eager attention."""

    def __init__(self, name: str, part: PartialAttention) -> None:
        self.name, self._part = name, part

    def dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        params: AttentionParams,
        causal: bool = False,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `PartialKernel.dense`."""
        if mask is not None or q.shape[-1] > MOST_HEAD_DIM or v.shape[-1] != q.shape[-1]:
            return eager_attention(q, k, v, params.scale, causal=causal, mask=mask, softcap=params.softcap)
        queries, keys, values = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        lengths = Lengths.of([len(queries)], [len(keys)], q.device)
        out, lse = self._part(queries, keys, values, lengths, causal, params)
        return out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)

    def decode(self, rows: Sequence[DecodeRow], cache: KVCache) -> Sequence[PagedTask]:
        """See `PartialKernel.decode`."""
        if cache.head_dim > MOST_HEAD_DIM or cache.value_dim != cache.head_dim:
            return super().decode(rows, cache)
        whole = [row for row in rows if row.first == 0]
        tasks: list[PagedTask] = [PagedRows(whole, cache, self._part)] if whole else []
        return [*tasks, *super().decode([row for row in rows if row.first > 0], cache)]


class PagedRows:
    """Decode rows that see their pages from the first token on, computed by one kernel call."""

    def __init__(self, rows: Sequence[DecodeRow], cache: KVCache, part: PartialAttention) -> None:
        self.rows = torch.tensor([row.token for row in rows], device=cache.device)
        self._part = part
        stops, tables = [row.stop for row in rows], [row.blocks for row in rows]
        self._lengths = Lengths.of([1] * len(rows), stops, cache.device, tables)

    def run_with_lse(self, q: Tensor, cache: KVCache, params: AttentionParams) -> tuple[Tensor, Tensor]:
        """See `PagedTask.run_with_lse`."""
        # A single query sees all of its keys, so no causal mask is needed.
        out, lse = self._part(q, *cache.paged_views(params.layer), self._lengths, False, params)
        return out, lse.transpose(0, 1)


def choose_cuda_partial(
    dtype: torch.dtype, block_size: int, load: Import = importlib.import_module, softcap: bool = False
) -> PartialKernel:
    """Return the partial attention kernels of the first usable flash-attention package, or eager attention. `load` imports a
    module by its name; `block_size` is the page size in tokens.

    A package that is missing, too old, or without support for this page size is skipped, and with `softcap` one that cannot cap
    scores. Only fp16 and bf16 use packages.
    """
    if dtype in (torch.float16, torch.bfloat16):
        for module, multiple, adapt, needs in _OFFERS:
            function = _find(module, load) if block_size % multiple == 0 else None
            wanted = {*needs, "softcap"} if softcap else set(needs)
            if function is not None and wanted <= inspect.signature(function).parameters.keys():
                return FlashPartial(f"{module} (CUDA)", adapt(function))
    return EagerPartial()


def _find(module: str, load: Import) -> Callable[..., Any] | None:
    try:
        function: Callable[..., Any] = load(module).flash_attn_varlen_func
    except (ImportError, OSError, AttributeError):
        return None
    return function


def _int32(values: list[Any], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
