"""The plan of one step of context-parallel attention, shared by all layers: how the queries of each row reach its keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from actors.groups.group import Group
from actors.model.attention.context.dcp_heads import HeadExchange
from actors.model.attention.context.local_rows import KeyLayout, KeyRun, LocalRow, RowGroups, local_rows
from actors.model.attention.context.mask_spans import MaskSpan, mask_spans
from actors.model.attention.context.pass_kv import Gathered, Ring, Style
from actors.model.attention.context.pass_q import QueryExchange
from actors.model.attention.decode_row import decode_row
from actors.model.attention.partial import PagedTask, PartialKernel
from actors.model.kv.kv_cache import KVCache
from actors.model.kv.pages import Source, source
from actors.model.step.batch import Batch
from placement.ownership.context import ContextRank

MakeStyle = Callable[[Group, Sequence[KeyLayout], Sequence[LocalRow], ContextRank, torch.device], Style]
STYLES: dict[str, MakeStyle] = {"ring": Ring, "allgather": Gathered}


@dataclass(frozen=True)
class ContextConfig:
    """The constants of a rank's context-parallel attention. `passes_keys` (new tokens, cached tokens) decides between pass-KV
    and pass-Q for split rows."""

    place: ContextRank
    kernel: PartialKernel
    cp: Group
    heads: HeadExchange
    style: MakeStyle
    passes_keys: Callable[[int, int], bool]


class ContextPlan:
    """One step on one rank, for all its layers.

    Tokens with shared keys are renumbered, consecutively in the order of `RowGroups.shared`::

        [ rows run whole: num_whole | pass-KV rows | pass-Q rows: num_pass_q_tokens ]
    """

    def __init__(self, batch: Batch, cache: KVCache, config: ContextConfig) -> None:
        self._cache, self._place, self._kernel = cache, config.place, config.kernel
        self._mask_spans: dict[tuple[int, tuple[range, ...], int | None], list[MaskSpan]] = {}
        self._decode: dict[int | None, Sequence[PagedTask]] = {}
        rows = RowGroups.of(local_rows(batch, config.place), config.passes_keys)
        shared = rows.shared

        self.heads = config.heads
        self.owned = torch.nonzero(batch.slots >= 0).flatten()
        """Tokens of the step whose keys are written to own pages at once."""
        self.slots = batch.slots[self.owned]
        """The cache slots of `owned`."""
        self.chunks = [_at_hand(row) for row in rows.chunks]
        """The rows whose fresh keys are all local."""

        self.shared = _indices(shared, cache.device)
        """Tokens of the step that have shared keys, in their new order."""
        self.shared_at = _numbered(shared)
        """By row: the range of its tokens in `shared`."""
        self.pages = {row.index: self._own_pages(row) for row in shared if not row.is_decode}
        """By row: its cached keys in own pages."""
        self.num_whole = _num_tokens(rows.whole)
        self.decodes = [row for row in rows.whole if row.is_decode]
        self.whole_chunks = [row for row in rows.whole if not row.is_decode]

        self.split_tokens = _indices(rows.split, cache.device)
        self.pass_kv_rows = rows.pass_kv_rows
        self.style = _style(rows, config, cache.device) if rows.split else None
        self.num_pass_q_tokens = _num_tokens(rows.pass_q_rows)
        self.pass_q = QueryExchange(config.cp, rows.pass_q_rows, config.place) if rows.pass_q_rows else None

    def mask_spans(self, run: KeyRun, spans: tuple[range, ...], window: int | None) -> list[MaskSpan]:
        """Return the kernel calls with which queries at the positions `spans` attend to the keys of `run`, under the sliding
        `window` (tokens; None: all). They are made once a step, and cached."""
        key = (id(run), spans, window)
        if key not in self._mask_spans:
            self._mask_spans[key] = mask_spans(spans, run.positions, window, self._cache.device)
        return self._mask_spans[key]

    def decode(self, window: int | None) -> Sequence[PagedTask]:
        """Return the kernel calls of the decode rows that see keys in own pages under the sliding `window` (tokens; None: all).
        Their tokens are numbered as in `shared`. They are made once a step, and cached."""
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

    def _own_pages(self, row: LocalRow) -> tuple[KeyRun, Source | None]:
        """Return the cached keys of a row that lie on this rank, and how to read them (None if there are none)."""
        positions = self._place.ownership().positions(row.start)
        read = source(self._cache, row.blocks, 0, len(positions)) if len(positions) else None
        return KeyRun(row, slice(0, len(positions)), positions), read


def _style(rows: RowGroups, config: ContextConfig, device: torch.device) -> Style:
    place = config.place
    layouts = [KeyLayout.sent_by(rank, rows.split, rows.pass_kv_rows, place) for rank in range(place.cp)]
    return config.style(config.cp, layouts, rows.split, place, device)


def _at_hand(row: LocalRow) -> KeyRun:
    """Return the fresh keys of a row that this rank runs whole."""
    return KeyRun(row, slice(0, row.count), np.arange(row.start, row.start + row.count))


def _length(tokens: slice) -> int:
    return int(tokens.stop) - int(tokens.start)


def _num_tokens(rows: Sequence[LocalRow]) -> int:
    """Return the number of tokens of `rows` that this rank runs."""
    return sum(_length(row.tokens) for row in rows)


def _numbered(rows: Sequence[LocalRow]) -> dict[int, slice]:
    """Return, for each row, the range of its tokens when the tokens of `rows` are laid end to end."""
    found, at = {}, 0
    for row in rows:
        found[row.index] = slice(at, at + _length(row.tokens))
        at += _length(row.tokens)
    return found


def _indices(rows: Sequence[LocalRow], device: torch.device) -> Tensor:
    """Return the indices in the step of the tokens of `rows`, laid end to end."""
    found = [token for row in rows for token in range(row.tokens.start, row.tokens.stop)]
    return torch.tensor(found, dtype=torch.int64, device=device)
