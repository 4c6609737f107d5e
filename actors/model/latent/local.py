"""Latent attention (MLA) on a rank that holds all positions: each sequence uses the form that is cheaper for it.

few new tokens after many cached ones      absorbed: the device's own paged attention, with one KV head
many new tokens                            naive: the new tokens among themselves, then the cached ones piece by piece

keys:    cached                            new
        [ piece 0 | piece 1 | piece 2 ]   [ .       ]
        [ . . . .   . . . .   . .     ]   [ . .     ]      each piece is expanded into keys and values on its own, and
        [ . . . .   . . . .   . .     ]   [ . . .   ]      merged by log-sum-exp: memory does not grow with the context
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from actors.model.attention.backend import AttentionBackend
from actors.model.attention.params import AttentionParams
from actors.model.attention.partial import PartialKernel
from actors.model.attention.partial_outputs import OutputAccumulator
from actors.model.kv.kv_cache import KVCache
from actors.model.kv.pages import Source, source
from actors.model.latent.forms import Absorbed, Naive
from actors.model.latent.heads import LatentHeads
from actors.model.step.batch import Batch
from placement.model.mla_spec import MLASpec

PIECE_TOKENS = 1024
"""Cached tokens that are expanded at a time: for 128 heads of 192, 50 million elements each for keys and values."""


@dataclass(frozen=True)
class NaiveRow:
    """One sequence in naive form: the range of its new tokens in the step, and the pieces of its context."""

    tokens: slice
    context: Sequence[Source]


@dataclass(frozen=True)
class LatentPlan:
    """A step, divided by form. `tokens` are those of the absorbed sequences, and `absorbed` is their plan (None if there are
    none)."""

    tokens: slice | Tensor
    absorbed: Any
    naive: Sequence[NaiveRow]
    slots: Tensor
    """Cache slots of all tokens of the step."""


class LocalLatent:
    """The `LatentBackend` on top of a device's paged attention, and of its kernel for local keys."""

    def __init__(self, mla: MLASpec, paged: AttentionBackend, kernel: PartialKernel) -> None:
        self.name = f"latent: absorbed by {paged.name}, naive by {kernel.name}"
        self._mla, self._paged, self._kernel = mla, paged, kernel

    def prepare(self, batch: Batch, cache: KVCache) -> LatentPlan:
        """See `LatentBackend.prepare`."""
        sizes = zip(batch.query_lens, batch.context_lens, strict=True)
        absorbed = [row for row, (new, cached) in enumerate(sizes) if self._mla.absorbs_row(new, cached)]
        if len(absorbed) == len(batch.query_lens):
            return LatentPlan(slice(None), self._paged.prepare(batch, cache), [], batch.slots)
        some, tokens = batch.only(absorbed)
        plan = self._paged.prepare(some, cache) if absorbed else None
        return LatentPlan(tokens, plan, list(_naive_rows(batch, cache, set(absorbed))), batch.slots)

    def attend(
        self, q: Tensor, latents: Tensor, heads: LatentHeads, cache: KVCache, plan: LatentPlan, params: AttentionParams
    ) -> Tensor:
        """See `LatentBackend.attend`."""
        if not plan.naive:
            return self._absorbed(q, latents, heads, cache, plan, params)
        out = q.new_empty(*q.shape[:2], self._mla.value_dim)
        if plan.absorbed is not None:
            at = plan.tokens
            out[at] = self._absorbed(q[at], latents[at], heads, cache, plan, params)
        for row in plan.naive:
            at = row.tokens
            cache.write(params.layer, plan.slots[at], latents[at, None], latents[at, None])
            out[at] = self._naive(q[at], latents[at], heads, cache, row, params)
        return out

    def _absorbed(
        self, q: Tensor, latents: Tensor, heads: LatentHeads, cache: KVCache, plan: LatentPlan, params: AttentionParams
    ) -> Tensor:
        form, one_head = Absorbed(heads), latents.unsqueeze(1)
        out = self._paged.attend(form.queries(q), one_head, one_head, cache, plan.absorbed, params)
        return form.outputs(form.partial_outputs(out.transpose(0, 1))).transpose(0, 1)

    def _naive(
        self, q: Tensor, latents: Tensor, heads: LatentHeads, cache: KVCache, row: NaiveRow, params: AttentionParams
    ) -> Tensor:
        form, queries = Naive(heads), q.transpose(0, 1).unsqueeze(0)
        out, lse = self._kernel.dense(queries, *form.keys_values(latents[:, None]), params, causal=True)
        if row.context:
            total = OutputAccumulator(heads.num_heads, len(q), form.partial_dim, q.device)
            total.add(slice(None), form.partial_outputs(out[0]), lse[0])
            for piece in row.context:
                cached, _ = piece.read(cache, params.layer)
                out, lse = self._kernel.dense(queries, *form.keys_values(cached[0].transpose(0, 1)), params)
                total.add(slice(None), form.partial_outputs(out[0]), lse[0])
            return total.out.transpose(0, 1).to(q.dtype)
        return form.partial_outputs(out[0]).transpose(0, 1)


def _naive_rows(batch: Batch, cache: KVCache, absorbed: set[int]) -> Iterator[NaiveRow]:
    starts = pairwise(accumulate(batch.query_lens, initial=0))
    for row, ((start, stop), cached) in enumerate(zip(starts, batch.context_lens, strict=True)):
        if row not in absorbed:
            pieces = (range(first, min(first + PIECE_TOKENS, cached)) for first in range(0, cached, PIECE_TOKENS))
            table = batch.block_tables[row]
            yield NaiveRow(slice(start, stop), [source(cache, table, piece.start, piece.stop) for piece in pieces])
