"""The paged attention backend of CPUs: a compiled kernel that reads pages in place for decode rows, and torch's flash-attention
operator, which has no page tables, for prefill, and for all rows where there is no compiled kernel.

A step becomes a few tasks (buckets of decode rows, prefill chunks). They are planned once a step for each sliding window that a
model uses, and shared by all layers with that window.
"""

from __future__ import annotations

from torch import Tensor

from actors.model.attention.cpu.decode import DecodeBucket, plan_decode
from actors.model.attention.cpu.paged import PagedDecode
from actors.model.attention.cpu.prefill import WholeChunk, WindowBlock, plan_prefill
from actors.model.attention.params import AttentionParams
from actors.model.kv.kv_cache import KVCache
from actors.model.step.batch import Batch

Task = PagedDecode | DecodeBucket | WholeChunk | WindowBlock


class CpuPlan:
    """The tasks of one step, by sliding window."""

    def __init__(self, batch: Batch, cache: KVCache) -> None:
        self.slots = batch.slots
        self._batch, self._cache = batch, cache
        self._tasks: dict[int | None, list[Task]] = {}

    def tasks(self, window: int | None) -> list[Task]:
        """Return the kernel calls that together cover every token of the step exactly once, for layers with the sliding
        `window` (tokens; None: all). They are made once a step, and cached."""
        if window not in self._tasks:
            decode, prefill = (plan(self._batch, self._cache, window) for plan in (plan_decode, plan_prefill))
            self._tasks[window] = [*decode, *prefill]
        return self._tasks[window]


class CpuAttention:
    """The CPU `AttentionBackend`."""

    name = "torch flash (CPU)"

    def prepare(self, batch: Batch, cache: KVCache) -> CpuPlan:
        """See `AttentionBackend.prepare`."""
        return CpuPlan(batch, cache)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache,
        plan: CpuPlan,
        params: AttentionParams,
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        cache.write(params.layer, plan.slots, k, v)
        tasks = plan.tasks(params.window)
        if len(tasks) == 1:
            return tasks[0].run(q, k, v, cache, params)
        out = q.new_empty(*q.shape[:2], v.shape[2])
        for task in tasks:
            out[task.rows] = task.run(q[task.rows], k[task.rows], v[task.rows], cache, params)
        return out
