"""Decode attention on CPU with a compiled kernel that reads pages in place: all rows of a step in one call.

row      table         visible tokens
a        [ 7 2 9 ]     [0, 41)          one task for each 256 tokens and KV head; the tasks are divided among threads
b        [ 4 ]         [0, 6)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.model.attention.decode_row import DecodeRow, decode_rows
from actors.model.attention.params import AttentionParams
from actors.model.kernels.native.library import library
from actors.model.kv.kv_cache import KVCache
from actors.model.kv.pages import consecutive
from actors.model.step.batch import Batch


@dataclass(frozen=True)
class PagedDecode:
    """Decode rows for the compiled kernel. `tables` is [rows, blocks] int32, padded with 0; `firsts` and `stops` [rows] int32
    bound the visible tokens, counted from the start of the row's table."""

    rows: slice | Tensor
    tables: Tensor
    firsts: Tensor
    stops: Tensor

    @classmethod
    def of(cls, rows: Sequence[DecodeRow], device: torch.device) -> PagedDecode:
        """Return the call for `rows`, of which there must be at least one, on `device`."""
        longest = max(len(row.blocks) for row in rows)
        numbers = [[row.first, row.stop, *row.blocks, *[0] * (longest - len(row.blocks))] for row in rows]
        table = torch.tensor(numbers, dtype=torch.int32)
        firsts, stops = table[:, :2].t().contiguous()
        return cls(token_rows([row.token for row in rows], device), table[:, 2:], firsts, stops)

    def run(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, params: AttentionParams) -> Tensor:
        """Attend from `q` [rows, q_heads, dim] to the cached keys of the rows, in the layer of `params`. Returns [rows,
        q_heads, dim of values]. `k` and `v` are unused: they are in the cache already."""
        return self._run(q, cache, params, params.sinks, None)

    def run_with_lse(self, q: Tensor, cache: KVCache, params: AttentionParams) -> tuple[Tensor, Tensor]:
        """See `PagedTask.run_with_lse`."""
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        return self._run(q, cache, params, None, lse), lse

    def _run(self, q: Tensor, cache: KVCache, params: AttentionParams, sinks: Tensor | None, lse: Tensor | None) -> Tensor:
        native = library(q)
        assert native is not None, "a process that has the compiled kernels keeps them"
        pages = cache.keys(params.layer), cache.values(params.layer)
        return native.paged_attention(q, *pages, self.tables, self.firsts, self.stops, params.scale, params.softcap, sinks, lse)


class StaticDecode:
    """The plan of a decode step on tensors that stay in place from step to step, for `actors.model.decode_programs`: up to
    `rows` rows of up to `blocks` blocks. Later rows are padding: they see no tokens, and nothing of them is stored."""

    def __init__(self, rows: int, blocks: int, windows: Iterable[int | None]) -> None:
        """Make the plan for layers with the sliding `windows` (tokens; None: all)."""
        self.slots = torch.full((rows,), -1, dtype=torch.int64)
        self._tasks = {
            window: PagedDecode(
                slice(None),
                torch.zeros(rows, blocks, dtype=torch.int32),
                torch.zeros(rows, dtype=torch.int32),
                torch.zeros(rows, dtype=torch.int32),
            )
            for window in windows
        }

    def tasks(self, window: int | None) -> list[PagedDecode]:
        """Return the one kernel call for layers with the sliding `window` (tokens; None: all)."""
        return [self._tasks[window]]

    def fill(self, batch: Batch, block_size: int) -> None:
        """Fill the tensors with the rows of `batch`, each of one query token, in blocks of `block_size` tokens."""
        rows = batch.num_tokens
        self.slots[:rows], self.slots[rows:] = batch.slots, -1
        for window, task in self._tasks.items():
            numbers = PagedDecode.of(list(decode_rows(batch, block_size, window)), batch.slots.device)
            task.tables[:rows, : numbers.tables.shape[1]] = numbers.tables
            task.firsts[:rows], task.stops[:rows] = numbers.firsts, numbers.stops
            task.stops[rows:] = 0


def token_rows(tokens: list[int], device: torch.device) -> slice | Tensor:
    """Return a slice if the token indices `tokens` are consecutive (a view, no copy), else a tensor of them on `device`."""
    if consecutive(tokens):
        return slice(tokens[0], tokens[-1] + 1)
    return torch.tensor(tokens, device=device)
