"""The work of one rank on each row of a step under context parallelism: the tokens it runs, and the keys it stores or
exchanges.

    row          tokens here              its cached keys                     its fresh keys
    decode       1, on every cp rank      own pages, and the fresh key        -
    chunk        all, on every cp rank    own pages                           all, here
    split        two zig-zag chunks       own pages, and those of others      own chunks, and those of others

These are plain values, computed once a step from the numbers of the step plan alone, so that all ranks compute the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from actors.model.attention.context.mask_spans import Positions
from actors.model.step.batch import Batch
from placement.ownership.context import ContextRank, Ownership, is_split


@dataclass(frozen=True)
class LocalRow:
    """One row of a step on one rank."""

    index: int
    start: int
    """Number of cached tokens before this step."""
    count: int
    """Number of new tokens, over all cp ranks together."""
    tokens: slice
    """The range of this rank's new tokens of the row among its tokens of the step."""
    spans: tuple[range, ...]
    """Positions of these tokens."""
    blocks: list[int]
    """The KV blocks of the sequence that this rank owns."""
    is_split: bool

    @property
    def is_decode(self) -> bool:
        """Whether the row is a decode row: one new token over all cp ranks."""
        return self.count == 1

    @property
    def has_shared_keys(self) -> bool:
        """Whether some of the row's keys lie in the KV pages of their owners; the keys of a first chunk are all local."""
        return self.start > 0 or self.is_decode


def local_rows(batch: Batch, place: ContextRank) -> list[LocalRow]:
    """Return the rows of the step `batch` as this rank, `place`, runs them, in the order of the step."""
    rows, token = [], 0
    for index, (start, count, blocks) in enumerate(zip(batch.context_lens, batch.new_lens, batch.block_tables, strict=True)):
        runs = place.spans(start, count)
        tokens = slice(token, token + sum(map(len, runs)))
        rows.append(LocalRow(index, start, count, tokens, runs, blocks, is_split(count, place.cp)))
        token = tokens.stop
    return rows


@dataclass(frozen=True)
class RowGroups:
    """The rows of a step, grouped by how their queries reach keys. Each group keeps the order of the step::

    row       its fresh keys             its cached keys, if any
    decode    whole: in own pages        whole: in own pages
    chunk     chunks: local              whole: in own pages
    split     split: exchanged           pass_kv_rows: keys are exchanged | pass_q_rows: queries are exchanged
    """

    chunks: list[LocalRow] = field(default_factory=list)
    whole: list[LocalRow] = field(default_factory=list)
    split: list[LocalRow] = field(default_factory=list)
    pass_kv_rows: list[LocalRow] = field(default_factory=list)
    pass_q_rows: list[LocalRow] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Sequence[LocalRow], passes_keys: Callable[[int, int], bool]) -> RowGroups:
        """Return `rows` grouped by how their queries reach keys. ``passes_keys(new tokens, cached tokens)`` returns whether a
        split row exchanges its cached keys (pass-KV) rather than its queries (pass-Q)."""
        groups = cls()
        for row in rows:
            if row.is_split:
                groups.split.append(row)
                if row.start:
                    passing = groups.pass_kv_rows if passes_keys(row.count, row.start) else groups.pass_q_rows
                    passing.append(row)
            else:
                if not row.is_decode:
                    groups.chunks.append(row)
                if row.has_shared_keys:
                    groups.whole.append(row)
        return groups

    @property
    def shared(self) -> list[LocalRow]:
        """The rows that have keys in their owners' pages: the rows that are not split, then the pass-KV rows, then the pass-Q
        rows."""
        return [*self.whole, *self.pass_kv_rows, *self.pass_q_rows]


@dataclass(frozen=True)
class KeyRun:
    """Consecutive keys of one row in a tensor, ordered by position."""

    row: LocalRow
    keys: slice
    positions: Positions


class KeyLayout:
    """The contents of a tensor of keys and values, token by token: kind (fresh or cached), row and position."""

    FRESH, CACHED = 0, 1

    def __init__(self, kind: Positions, row: Positions, position: Positions) -> None:
        self.kind, self.row, self.position = kind, row, position

    @classmethod
    def sent_by(cls, cp_rank: int, split: Sequence[LocalRow], cached: Sequence[LocalRow], place: ContextRank) -> KeyLayout:
        """Return the layout of the keys that the rank `cp_rank` contributes to a step: its own chunks of the rows `split`, then
        its own pages of the rows `cached`. `place` is the calling rank."""
        parts = [
            (cls.FRESH, row.index, np.concatenate([np.arange(s.start, s.stop) for s in runs]))
            for row in split
            for runs in [place.spans(row.start, row.count, cp_rank)]
        ]
        parts += [(cls.CACHED, row.index, place.ownership(cp_rank).positions(row.start)) for row in cached]
        return cls.joined([cls(np.full(len(p), k), np.full(len(p), r), p) for k, r, p in parts])

    @classmethod
    def joined(cls, layouts: Sequence[KeyLayout]) -> KeyLayout:
        """Return the layout of tensors with these `layouts`, laid end to end."""
        columns = [[getattr(layout, name) for layout in layouts] for name in ("kind", "row", "position")]
        return cls(*(np.concatenate(column) if column else np.zeros(0, np.int64) for column in columns))

    def __len__(self) -> int:
        return len(self.position)

    def sorting(self) -> Positions:
        """Return the order, [tokens] int64 indices, that puts fresh tokens first, and sorts each kind by row and then by
        position."""
        return np.lexsort((self.position, self.row, self.kind))

    def reordered(self, order: Positions) -> KeyLayout:
        """Return the layout of the tensor whose token i is the token ``order[i]`` of this one."""
        return KeyLayout(self.kind[order], self.row[order], self.position[order])

    def runs(self, kind: int, rows: Sequence[LocalRow]) -> list[KeyRun]:
        """Return where the tokens of `kind` (`FRESH` or `CACHED`) of each of `rows` are, one run for each row that has any. The
        layout must be sorted (`sorting`)."""
        found = []
        for row in rows:
            at = np.flatnonzero((self.kind == kind) & (self.row == row.index))
            if len(at):
                found.append(KeyRun(row, slice(int(at[0]), int(at[-1]) + 1), self.position[at]))
        return found

    def owned(self, rows: Sequence[LocalRow], mine: Ownership, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the fresh tokens of `rows` that the KV owner `mine` stores: their indices in the layout, and the cache slots
        they are written to, both [owned] int64 on `device`."""
        at, slots = [], []
        for run in self.runs(self.FRESH, rows):
            for offset, position in enumerate(run.positions.tolist()):
                slot = mine.slot(position, run.row.blocks)
                if slot >= 0:
                    at.append(run.keys.start + offset)
                    slots.append(slot)
        return torch.tensor(at, dtype=torch.int64, device=device), torch.tensor(slots, dtype=torch.int64, device=device)
