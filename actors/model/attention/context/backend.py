"""The attention backend of context parallelism (CP, DCP): a sequence's keys lie on several ranks.

The output of a query is the sum of partial outputs over disjoint sets of keys, merged by their log-sum-exp::

    fresh     own heads      this step's keys, local or received
    shared    all heads of   cached keys, each on its owner:  - decode and short chunks: own pages here, summed over cp
              the dcp group                                   - split rows: pass-KV, or pass-Q (queries sent to the pages)
                  └── back to own heads, summed over dcp ──┐
    answer  =  fresh + ────────────────────────────────────┘

Collectives of a layer, each issued only if the step has rows that need it:

    all_gather dcp, all_to_all dcp    rows with cached keys: queries out, partial outputs back
    all_gather cp                     decode and short chunks with cached keys: partial outputs
    all_gather cp | send/recv cp      split rows: fresh keys, and cached ones under pass-KV (by cp_style)
    all_gather cp, all_to_all cp      split rows under pass-Q
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.groups.group import Group
from actors.model.attention.backend import with_sinks
from actors.model.attention.context.dcp_heads import HeadExchange
from actors.model.attention.context.forms import AttentionForm, AttentionInputs, plain_inputs
from actors.model.attention.context.local_rows import KeyRun, LocalRow
from actors.model.attention.context.pass_kv import Style
from actors.model.attention.context.plan import STYLES, ContextConfig, ContextPlan
from actors.model.attention.params import AttentionParams
from actors.model.attention.partial import PartialKernel
from actors.model.attention.partial_outputs import OutputAccumulator, merge_packed, pack
from actors.model.kv.kv_cache import KVCache
from actors.model.step.batch import Batch
from placement.layout.layout import Layout
from placement.layout.mesh import Coords
from placement.model.attention_kind import AttentionKind
from placement.model.spec import ModelSpec
from placement.ownership.context import ContextRank, passes_kv
from placement.ownership.context_heads import group_heads, weights


@dataclass(frozen=True)
class _Layer:
    """One call of `attend`."""

    plan: ContextPlan
    kernel: PartialKernel
    cache: KVCache
    params: AttentionParams
    form: AttentionForm
    """The form in which queries attend to shared keys."""

    def add_fresh(self, total: OutputAccumulator, inputs: AttentionInputs, run: KeyRun, kv: Tensor) -> None:
        """Add to `total` the attention of this rank's tokens of the row of `run` to fresh keys of that row, made from `kv`
        [keys, kv_heads, dim], whose positions are those of `run`."""
        row = run.row
        form = inputs.fresh(row)
        for at, out, lse in self._seen(form, form.queries(inputs.q[row.tokens]), row.spans, run, *form.keys_values(kv)):
            total.add(slice(row.tokens.start + at.start, row.tokens.start + at.stop), form.outputs(out), lse)

    def add_shared(
        self,
        total: OutputAccumulator,
        at: slice,
        q: Tensor,
        spans: tuple[range, ...],
        run: KeyRun,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """Add to the tokens `at` of `total` the attention of `q` [tokens, heads, dim], at the positions `spans`, to `keys` and
        `values` [1, kv_heads, keys, dim], whose positions are those of `run`."""
        for rows, out, lse in self._seen(self.form, q, spans, run, keys, values):
            total.add(slice(at.start + rows.start, at.start + rows.stop), out, lse)

    def add_pages(self, total: OutputAccumulator, at: slice, q: Tensor, row: LocalRow, spans: tuple[range, ...]) -> None:
        """Add to the tokens `at` of `total` the attention of `q` [tokens, heads, dim], at the positions `spans`, to the cached
        keys of `row` in this rank's own pages."""
        run, read = self.plan.pages[row.index]
        if read is not None:
            self.add_shared(total, at, q, spans, run, *read.read(self.cache, self.params.layer))

    def _seen(
        self, form: AttentionForm, q: Tensor, spans: tuple[range, ...], run: KeyRun, keys: Tensor, values: Tensor
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield one kernel call at a time: its queries, their partial output [heads, tokens, partial_dim], and its LSE."""
        queries = q.transpose(0, 1).unsqueeze(0)
        for call in self.plan.mask_spans(run, spans, self.params.window):
            out, lse = self.kernel.dense(
                queries[:, :, call.queries],
                keys[:, :, call.keys],
                values[:, :, call.keys],
                self.params,
                call.causal,
                call.mask,
            )
            yield call.queries, form.partial_outputs(out[0]), lse[0]


class ContextAttention:
    """The context-parallel `AttentionBackend` of one rank, with one config for each attention kind."""

    def __init__(self, *configs: ContextConfig) -> None:
        self._kernel, self._cp, self._configs = configs[0].kernel, configs[0].cp, configs
        self.name = f"context parallel, {self._kernel.name}"

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        layout: Layout,
        coords: Coords,
        groups: Mapping[str, Group],
        kernel: PartialKernel,
        block_size: int,
    ) -> ContextAttention:
        """Return the backend of the rank at `coords` of `layout`, with kernels of `kernel` and KV blocks of `block_size`
        tokens. `groups` are this rank's groups by axis, and must have ``cp`` and ``dcp`` (`KeyError` otherwise)."""
        place = ContextRank.of(layout, coords, block_size)

        def config(kind: AttentionKind) -> ContextConfig:
            exchange = HeadExchange(groups["dcp"], [*map(len, group_heads(kind, layout, coords.tp))])
            queries, keys = weights(kind, layout, coords.tp)

            def passes_keys(new: int, cached: int) -> bool:
                return passes_kv(new, cached, queries, keys, layout.cp)

            return ContextConfig(place, kernel, groups["cp"], exchange, STYLES[layout.cp_style], passes_keys)

        return cls(*map(config, spec.kinds))

    def prepare(self, batch: Batch, cache: KVCache) -> ContextPlan:
        """See `AttentionBackend.prepare`."""
        return ContextPlan(batch, cache, self._configs[cache.kind])

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache,
        plan: ContextPlan,
        params: AttentionParams,
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        return self.attend_inputs(plain_inputs(q, k, v), cache, plan, params)

    def attend_inputs(
        self,
        inputs: AttentionInputs,
        cache: KVCache,
        plan: ContextPlan,
        params: AttentionParams,
    ) -> Tensor:
        """Do what `attend` does for any KV format (heads or latents), with the queries and keys in `inputs`. Returns [tokens,
        q_heads, output_dim]."""
        q, kv, form = inputs.q, inputs.kv, inputs.shared
        call = _Layer(plan, self._kernel, cache, params, form)
        cache.write_kv(params.layer, plan.slots, kv[plan.owned])
        fresh = OutputAccumulator(q.shape[1], q.shape[0], inputs.output_dim, q.device)
        shared = OutputAccumulator(plan.heads.num_heads, len(plan.shared), form.partial_dim, q.device)
        shared_q = plan.heads.gather(form.queries(q[plan.shared])) if len(plan.shared) else q[:0]
        for run in plan.chunks:
            call.add_fresh(fresh, inputs, run, kv[run.row.tokens])
        if plan.num_whole:
            self._add_whole_rows(shared, shared_q, call)
        if plan.style is not None:
            self._add_passed_kv(plan.style, fresh, shared, inputs, shared_q, self._contribution(kv, call), call)
        if plan.pass_q is not None:
            rows = slice(len(plan.shared) - plan.num_pass_q_tokens, len(plan.shared))
            shared.add(rows, *plan.pass_q.attend(shared_q[rows], form.partial_dim, call.add_pages))
        if len(plan.shared):
            out, lse = plan.heads.scatter(shared, q.dtype)
            fresh.add(plan.shared, form.outputs(out.to(q.dtype)), lse)
        out = fresh.out if params.sinks is None else with_sinks(fresh.out, fresh.lse, params.sinks[:, None])
        return out.transpose(0, 1).to(q.dtype)

    def _add_whole_rows(self, shared: OutputAccumulator, q: Tensor, call: _Layer) -> None:
        """Compute the rows that every cp rank runs, each rank over its own pages, and merge the results over cp."""
        plan = call.plan
        here = OutputAccumulator(shared.out.shape[0], plan.num_whole, call.form.partial_dim, q.device)
        for task in plan.decode(call.params.window):
            out, lse = task.run_with_lse(q[task.rows], call.cache, call.params)
            here.add(task.rows, call.form.partial_outputs(out.transpose(0, 1)), lse.transpose(0, 1))
        for row in plan.whole_chunks:
            at = plan.shared_at[row.index]
            call.add_pages(here, at, q[at], row, row.spans)
        packed = self._cp.all_gather(pack(here.out, here.lse, q.dtype))
        shared.add(slice(0, plan.num_whole), *merge_packed(packed.view(self._cp.size, -1, *packed.shape[1:])))

    def _contribution(self, kv: Tensor, call: _Layer) -> Tensor:
        """Return the keys and values this rank sends, [tokens, kv_heads, dim]: its tokens of split rows, then its pages of the
        pass-KV rows."""
        plan = call.plan
        parts = [kv[plan.split_tokens]]
        for row in plan.pass_kv_rows:
            _, read = plan.pages[row.index]
            if read is not None:
                keys, values = read.read(call.cache, call.params.layer)
                parts.append(call.cache.joined(keys[0], values[0]).transpose(0, 1))
        return torch.cat(parts)

    def _add_passed_kv(
        self,
        style: Style,
        fresh: OutputAccumulator,
        shared: OutputAccumulator,
        inputs: AttentionInputs,
        shared_q: Tensor,
        own: Tensor,
        call: _Layer,
    ) -> None:
        """Compute the rows split over the cp ranks as their keys and values arrive, and write those that this rank owns to the
        cache."""
        for kv_step, tensor in style.kv_steps(own):
            call.cache.write_kv(call.params.layer, kv_step.slots, tensor[kv_step.owned])
            for run in kv_step.fresh:
                call.add_fresh(fresh, inputs, run, tensor[run.keys])
            for run in kv_step.cached:
                at = call.plan.shared_at[run.row.index]
                call.add_shared(shared, at, shared_q[at], run.row.spans, run, *call.form.keys_values(tensor[run.keys]))
