"""Attention where the keys of a sequence lie on several ranks: the `AttentionBackend` of every layout with cp or dcp.

Each query's answer is the sum of parts over disjoint keys, joined by their log-sum-exp::

    fresh     own heads      keys at hand or visiting: this step's own tokens
    shared    all heads of   keys that owners hold:  - decode and short chunks: own pages here, summed over cp
              the dcp group                          - split rows: visiting pages, or own queries visiting pages
                  └── back to own heads, summed over dcp ──┐
    answer  =  fresh + ────────────────────────────────────┘

Collectives of a layer, each only where the step has rows for it:

    all_gather dcp, all_to_all dcp    rows with cached keys: queries there, parts back
    all_gather cp                     decode and short chunks with cached keys: parts
    all_gather cp | send/recv cp      split rows: fresh keys, and cached ones where those travel (by cp_style)
    all_gather cp, all_to_all cp      split rows whose queries travel
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from actors.model.attention import with_sinks
from actors.model.attention_decode import decode_row
from actors.model.attention_heads import HeadExchange
from actors.model.attention_kernel import PagedTask, PartialKernel
from actors.model.attention_pages import Source, source
from actors.model.attention_parts import Sum, merge_packed, pack
from actors.model.attention_queries import QueryExchange
from actors.model.attention_shares import KeyRun, RowShare, Shelf, shares
from actors.model.attention_sights import Sight, sights
from actors.model.attention_visits import Gathered, Ring, Style
from actors.model.batch import Batch
from actors.model.group import Group
from actors.model.kv_cache import KVCache
from placement.context import Place, passes_kv
from placement.layout import Layout
from placement.mesh import Coords
from placement.model_spec import ModelSpec
from placement.shards import heads

MakeStyle = Callable[[Group, Sequence[Shelf], Sequence[RowShare], Place, torch.device], Style]
STYLES: dict[str, MakeStyle] = {"ring": Ring, "allgather": Gathered}


@dataclass(frozen=True)
class Setting:
    """What does not change from step to step. `keys_travel` (new tokens, cached tokens) decides for split rows."""

    place: Place
    kernel: PartialKernel
    cp: Group
    heads: HeadExchange
    style: MakeStyle
    keys_travel: Callable[[int, int], bool]


class ContextPlan:
    """A step on one rank, for all its layers. Tokens with shared keys are numbered anew: whole rows, then split ones."""

    def __init__(self, batch: Batch, cache: KVCache, setting: Setting) -> None:
        self._cache, self._place, self._kernel = cache, setting.place, setting.kernel
        place, cp = setting.place, setting.cp
        self._sights: dict[tuple[int, tuple[range, ...], int | None], list[Sight]] = {}
        self._decode: dict[int | None, Sequence[PagedTask]] = {}
        rows = shares(batch, place)
        whole = [row for row in rows if not row.is_split and row.has_shared_keys]
        self.split = [row for row in rows if row.is_split]
        cached = [row for row in self.split if row.start]
        self.passing_keys = [row for row in cached if setting.keys_travel(row.count, row.start)]
        passing_queries = [row for row in cached if row not in self.passing_keys]

        self.kept = torch.nonzero(batch.slots >= 0).flatten()
        self.slots = batch.slots[self.kept]
        self.chunks = [_at_hand(row) for row in rows if not row.is_split and not row.is_decode]
        self.decodes = [row for row in whole if row.is_decode]
        self.pages = {row.index: self._own_pages(row) for row in [*whole, *cached] if not row.is_decode}
        self.shared_at = _numbered([*whole, *self.passing_keys, *passing_queries])
        self.num_whole = sum(row.count for row in whole)
        self.whole_chunks = [row for row in whole if not row.is_decode]
        self.shared = _indices([*whole, *self.passing_keys, *passing_queries], cache.device)
        self.split_tokens = _indices(self.split, cache.device)

        self.queries = QueryExchange(cp, passing_queries, place) if passing_queries else None
        self.num_queries = sum(_length(row.tokens) for row in passing_queries)
        self.style = self._style(cp, setting.style) if self.split else None

    def sights(self, run: KeyRun, spans: tuple[range, ...], window: int | None) -> list[Sight]:
        """The kernel calls of queries at `spans` over the keys of `run`, made once a step."""
        key = (id(run), spans, window)
        if key not in self._sights:
            self._sights[key] = sights(spans, run.positions, window, self._cache.device)
        return self._sights[key]

    def decode(self, window: int | None) -> Sequence[PagedTask]:
        """Tasks of the decode rows that see keys in own pages; their tokens are numbered as shared."""
        if window not in self._decode:
            mine, size = self._place.ownership(), self._place.block_size
            found = []
            for row in self.decodes:
                first = 0 if window is None else mine.length(max(0, row.start + 1 - window))
                stop = mine.length(row.start + 1)
                if first < stop:
                    found.append(decode_row(self.shared_at[row.index].start, row.blocks, first, stop, size))
            self._decode[window] = self._kernel.decode(found, self._cache) if found else []
        return self._decode[window]

    def _own_pages(self, row: RowShare) -> tuple[KeyRun, Source | None]:
        """The cached keys of a row that lie here, and where; None where there are none."""
        positions = self._place.ownership().positions(row.start)
        read = source(self._cache, row.blocks, 0, len(positions)) if len(positions) else None
        return KeyRun(row, slice(0, len(positions)), positions), read

    def _style(self, cp: Group, make: MakeStyle) -> Style:
        place = self._place
        shelves = [Shelf.sent_by(rank, self.split, self.passing_keys, place) for rank in range(place.cp)]
        return make(cp, shelves, self.split, place, self._cache.device)


@dataclass(frozen=True)
class _Layer:
    """One call of `attend`."""

    plan: ContextPlan
    kernel: PartialKernel
    cache: KVCache
    layer: int
    window: int | None
    scale: float
    softcap: float | None

    def add(
        self, total: Sum, at: slice, q: Tensor, spans: tuple[range, ...], run: KeyRun, keys: Tensor, values: Tensor
    ) -> None:
        """Add to the tokens `at` of `total` what `q` [tokens, heads, dim] sees of `keys`, `values` [1, kv_heads, keys, dim]."""
        queries = q.transpose(0, 1).unsqueeze(0)
        for call in self.plan.sights(run, spans, self.window):
            out, lse = self.kernel.dense(
                queries[:, :, call.queries],
                keys[:, :, call.keys],
                values[:, :, call.keys],
                self.scale,
                self.softcap,
                call.causal,
                call.mask,
            )
            total.add(slice(at.start + call.queries.start, at.start + call.queries.stop), out[0], lse[0])

    def add_pages(self, total: Sum, at: slice, q: Tensor, row: RowShare, spans: tuple[range, ...]) -> None:
        """As `add`, over the cached keys of `row` in own pages."""
        run, read = self.plan.pages[row.index]
        if read is not None:
            self.add(total, at, q, spans, run, *read.read(self.cache, self.layer))


class ContextAttention:
    """The backend of one rank."""

    def __init__(self, setting: Setting) -> None:
        self.name = f"context parallel, {setting.kernel.name}"
        self._setting = setting
        self._cp, self._heads = setting.cp, setting.heads

    @classmethod
    def of(
        cls, spec: ModelSpec, layout: Layout, at: Coords, groups: Mapping[str, Group], kernel: PartialKernel, block_size: int
    ) -> ContextAttention:
        """The backend of the rank at `at`, which has the groups ``cp`` and ``dcp``."""
        place = Place.of(layout, at, block_size)
        held = [len(q_heads) for q_heads, _ in heads(spec, layout.tp, layout.tp_shares)]
        first = at.tp - place.dcp_rank

        def keys_travel(new: int, cached: int) -> bool:
            return passes_kv(new, cached, spec.num_heads, spec.num_kv_heads, layout.cp)

        exchange = HeadExchange(groups["dcp"], held[first : first + layout.dcp])
        return cls(Setting(place, kernel, groups["cp"], exchange, STYLES[layout.cp_style], keys_travel))

    def prepare(self, batch: Batch, cache: KVCache) -> ContextPlan:
        return ContextPlan(batch, cache, self._setting)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache,
        layer: int,
        plan: ContextPlan,
        window: int | None,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        call = _Layer(plan, self._setting.kernel, cache, layer, window, scale, softcap)
        cache.write(layer, plan.slots, k[plan.kept], v[plan.kept])
        tokens, own_heads, dim = q.shape
        fresh = Sum(own_heads, tokens, dim, q.device)
        shared = Sum(self._heads.num_heads, len(plan.shared), dim, q.device)
        visitors = self._heads.gather(q[plan.shared]) if len(plan.shared) else q[:0]
        for run in plan.chunks:
            keys, values = (x[run.row.tokens].transpose(0, 1).unsqueeze(0) for x in (k, v))
            call.add(fresh, run.row.tokens, q[run.row.tokens], run.row.spans, run, keys, values)
        if plan.num_whole:
            self._add_whole_rows(shared, visitors, call)
        if plan.style is not None:
            self._add_visits(plan.style, fresh, shared, q, visitors, self._contribution(k, v, call), call)
        if plan.queries is not None:
            rows = slice(len(plan.shared) - plan.num_queries, len(plan.shared))
            shared.add(rows, *plan.queries.attend(visitors[rows], call.add_pages))
        if len(plan.shared):
            fresh.add(plan.shared, *self._heads.scatter(shared, q.dtype))
        out = fresh.out if sinks is None else with_sinks(fresh.out, fresh.lse, sinks[:, None])
        return out.transpose(0, 1).to(q.dtype)

    def _add_whole_rows(self, shared: Sum, q: Tensor, call: _Layer) -> None:
        """Rows that every cp rank runs: each over its own pages, then joined over cp."""
        plan = call.plan
        here = Sum(shared.out.shape[0], plan.num_whole, q.shape[2], q.device)
        for task in plan.decode(call.window):
            out, lse = task.run_with_lse(q[task.rows], call.cache, call.layer, call.scale, call.softcap)
            here.add(task.rows, out.transpose(0, 1), lse.transpose(0, 1))
        for row in plan.whole_chunks:
            at = plan.shared_at[row.index]
            call.add_pages(here, at, q[at], row, row.spans)
        packed = self._cp.all_gather(pack(here.out, here.lse, q.dtype))
        shared.add(slice(0, plan.num_whole), *merge_packed(packed.view(self._cp.size, -1, *packed.shape[1:])))

    def _contribution(self, k: Tensor, v: Tensor, call: _Layer) -> Tensor:
        """[tokens, 2, kv_heads, dim]: this rank's tokens of split rows, and its pages of the rows whose cached keys travel."""
        plan = call.plan
        parts = [torch.stack((k[plan.split_tokens], v[plan.split_tokens]), 1)]
        for row in plan.passing_keys:
            _, read = plan.pages[row.index]
            if read is not None:
                keys, values = read.read(call.cache, call.layer)
                parts.append(torch.stack((keys[0], values[0])).permute(2, 0, 1, 3))
        return torch.cat(parts)

    def _add_visits(
        self, style: Style, fresh: Sum, shared: Sum, q: Tensor, visitors: Tensor, own: Tensor, call: _Layer
    ) -> None:
        """Rows split over the cp ranks: over keys and values as they come by; those this rank owns stay."""
        for visit, tensor in style.visits(own):
            call.cache.write(call.layer, visit.slots, tensor[visit.kept, 0], tensor[visit.kept, 1])
            keys, values = tensor.permute(1, 2, 0, 3).unsqueeze(1)
            for run in visit.fresh:
                tokens = run.row.tokens
                call.add(fresh, tokens, q[tokens], run.row.spans, run, keys[:, :, run.keys], values[:, :, run.keys])
            for run in visit.cached:
                at = call.plan.shared_at[run.row.index]
                call.add(shared, at, visitors[at], run.row.spans, run, keys[:, :, run.keys], values[:, :, run.keys])


def _at_hand(row: RowShare) -> KeyRun:
    """The fresh keys of a row that this rank runs whole."""
    return KeyRun(row, slice(0, row.count), np.arange(row.start, row.start + row.count))


def _length(tokens: slice) -> int:
    return int(tokens.stop) - int(tokens.start)


def _numbered(rows: Sequence[RowShare]) -> dict[int, slice]:
    """The tokens of each row where those of `rows` lie end to end."""
    found, at = {}, 0
    for row in rows:
        found[row.index] = slice(at, at + _length(row.tokens))
        at += _length(row.tokens)
    return found


def _indices(rows: Sequence[RowShare], device: torch.device) -> Tensor:
    """The tokens of `rows` in the step, end to end."""
    found = [token for row in rows for token in range(row.tokens.start, row.tokens.stop)]
    return torch.tensor(found, dtype=torch.int64, device=device)
