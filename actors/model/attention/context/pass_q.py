"""Pass-Q in context parallelism: exchanging queries instead of keys, for few new tokens with a long cached context (Yang et al.
2024, arXiv 2411.01783).

All cp ranks receive all queries of these rows, each rank attends to the pages it owns, and the partial outputs are returned::

    rank 0   q0 ─┐ all_gather   [q0 q1] x own pages ─┐ all_to_all   q0: parts of rank 0 and 1, merged
    rank 1   q1 ─┘              [q0 q1] x own pages ─┘              q1: parts of rank 0 and 1, merged

Only cached keys are attended to in this way. The fresh keys are exchanged in any case, because the owners of their blocks must
receive them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from actors.groups.group import Group
from actors.model.attention.context.local_rows import LocalRow
from actors.model.attention.partial_outputs import OutputAccumulator, merge_packed, pack
from placement.ownership.context import ContextRank

AddCached = Callable[[OutputAccumulator, slice, Tensor, LocalRow, tuple[range, ...]], None]
"""A function that adds to the tokens ``slice`` of an accumulator the attention of queries [tokens, heads, dim] at the given
positions to the row's own pages."""


class QueryExchange:
    """The two pass-Q collectives of the rows `rows` in one step."""

    def __init__(self, cp: Group, rows: Sequence[LocalRow], place: ContextRank) -> None:
        self._cp = cp
        self._runs = [(row, place.spans(row.start, row.count, cp_rank)) for cp_rank in range(place.cp) for row in rows]
        lengths = [sum(map(len, runs)) for _, runs in self._runs]
        self._sizes = [sum(lengths[rank * len(rows) : (rank + 1) * len(rows)]) for rank in range(place.cp)]

    def attend(self, q: Tensor, partial_dim: int, add_cached: AddCached) -> tuple[Tensor, Tensor]:
        """Attend from this rank's queries `q` [tokens, heads, dim] to the pages of all cp ranks. `partial_dim` is the size of a
        partial output, and `add_cached` computes those over this rank's own pages. A collective of the cp group.

        Returns the output [heads, tokens, partial_dim] and its LSE [heads, tokens], both fp32.
        """
        everybody = self._cp.all_gather(q, self._sizes)
        parts = OutputAccumulator(q.shape[1], len(everybody), partial_dim, q.device)
        at = 0
        for row, runs in self._runs:
            tokens = slice(at, at + sum(map(len, runs)))
            add_cached(parts, tokens, everybody[tokens], row, runs)
            at = tokens.stop
        packed = pack(parts.out.transpose(0, 1), parts.lse.transpose(0, 1), q.dtype)
        own = len(q)
        received = self._cp.all_to_all(packed, self._sizes, [own] * self._cp.size)
        out, lse = merge_packed(received.view(self._cp.size, own, *received.shape[1:]))
        return out.transpose(0, 1), lse.transpose(0, 1)
