"""Traffic of context-parallel attention (CP, DCP): ring attention, pass-KV, pass-Q and the merge of partial outputs, per layer.

`d` is head_dim and `e` the bytes per element; an exchanged partial output carries its log-sum-exp (4 bytes). Latent attention
sends queries of latent_dim, outputs of kv_lora_rank, and one latent of latent_dim in place of keys and values
(``2 * kv heads * d``). Layers of different attention kinds (`placement.model.attention_kind`, which defines all of these
dimensions) are counted kind by kind::

    dcp all_gather     queries of rows with cached keys, to the group         own heads * tokens * d * e
    cp  all_gather     partial outputs of rows that every cp rank runs        group's heads * tokens * (d * e + 4)
    cp  send / recv    ring: keys and values of split rows, cp - 1 times      tokens of one rank * 2 * kv heads * d * e
    cp  all_gather     allgather: the same in one call
    cp  all_gather     queries of split rows under pass-Q                     group's heads * tokens * d * e
    cp  all_to_all     their partial outputs, returned                        group's heads * all tokens * (d * e + 4)
    dcp all_to_all     partial outputs of the gathered queries, returned      group's heads * tokens * (d * e + 4)

The keys and values of a split row are those of its new tokens, and under pass-KV (`placement.ownership.context.passes_kv`) its
cached ones as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from placement.cost.collectives import TrafficEntry, all_gather, all_to_all, recv, send
from placement.cost.step_shape import RowShape, StepShape
from placement.layout.layout import Layout
from placement.layout.mesh import Coords
from placement.model.attention_kind import AttentionKind
from placement.model.spec import ModelSpec
from placement.ownership.context import Ownership, is_split, passes_kv, spans
from placement.ownership.context_heads import group_heads, weights
from placement.ownership.shard import Shard

_LSE_BYTES = 4


@dataclass(frozen=True)
class _Step:
    """The rows of a step on one rank, classified by how their queries attend to keys, in layers of one attention kind."""

    spec: ModelSpec
    layout: Layout
    coords: Coords
    own: Shard
    step: StepShape
    index: int
    """Index of the attention kind in `ModelSpec.kinds`."""

    @property
    def kind(self) -> AttentionKind:
        """The attention kind at `index`."""
        return self.spec.kinds[self.index]

    @property
    def layers(self) -> int:
        """Number of layers of this kind on the rank."""
        return sum(self.spec.kind_of(layer) == self.index for layer in self.own.layers)

    @property
    def whole(self) -> list[RowShape]:
        """Rows that every cp rank runs, and whose keys are split over the owners of KV blocks."""
        return [row for row in self.step.rows if not self._is_split(row) and (row.context or row.tokens == 1)]

    @property
    def split(self) -> list[RowShape]:
        """Rows split over the cp ranks."""
        return [row for row in self.step.rows if self._is_split(row)]

    @property
    def pass_kv_rows(self) -> list[RowShape]:
        """Split rows whose cached keys are exchanged (pass-KV)."""
        return [row for row in self.split if row.context and self._passes_keys(row)]

    @property
    def pass_q_rows(self) -> list[RowShape]:
        """Split rows whose queries are sent to the cached keys (pass-Q)."""
        return [row for row in self.split if row.context and not self._passes_keys(row)]

    @property
    def group_heads(self) -> int:
        """Number of query heads of the rank's dcp group."""
        return sum(map(len, group_heads(self.kind, self.layout, self.coords.tp)))

    @property
    def query_bytes(self) -> int:
        """Bytes of one head of one query."""
        return self.kind.key_dim * self.step.element_bytes

    @property
    def part_bytes(self) -> int:
        """Bytes of one head's partial output for one query, including its log-sum-exp."""
        return self.kind.partial_dim * self.step.element_bytes + _LSE_BYTES

    def run(self, rows: list[RowShape], cp_rank: int | None = None) -> int:
        """Returns the number of tokens of `rows` that a cp rank runs (None: this one)."""
        rank = self.coords.cp if cp_rank is None else cp_rank
        return sum(len(span) for row in rows for span in spans(row.context, row.tokens, self.layout.cp, rank))

    def passed_kv_bytes(self, cp_rank: int) -> int:
        """Returns the bytes of keys and values that a cp rank contributes per layer: those of its chunks, and the exchanged
        cached ones in its pages."""
        owner = cp_rank * self.layout.dcp + self.coords.tp % self.layout.dcp
        mine = Ownership(self.layout.cp * self.layout.dcp, owner, self.step.block_size)
        tokens = self.run(self.split, cp_rank) + sum(mine.length(row.context) for row in self.pass_kv_rows)
        return tokens * len(self.own.heads[self.index][1]) * self.kind.cached_dim * self.step.element_bytes

    def _is_split(self, row: RowShape) -> bool:
        return is_split(row.tokens, self.layout.cp)

    def _passes_keys(self, row: RowShape) -> bool:
        return passes_kv(row.tokens, row.context, *weights(self.kind, self.layout, self.coords.tp), self.layout.cp)


def context(spec: ModelSpec, layout: Layout, coords: Coords, own: Shard, step: StepShape) -> Iterator[TrafficEntry]:
    """Yields every context-parallel (cp, dcp) collective of one rank in one step: kind by kind of attention, and in execution
    order for each kind. `coords` and `own` are the rank's coordinates and shard; `step` has the rows of its DP rank only.
    Yields nothing if ``cp * dcp`` is 1."""
    if layout.kv_owners == 1:
        return
    for index, kind in enumerate(spec.kinds):
        yield from (
            replace(entry, where=f"{kind.label}{entry.where}")
            for entry in _of_kind(_Step(spec, layout, coords, own, step, index))
        )


def _of_kind(rows: _Step) -> Iterator[TrafficEntry]:
    """Yields the collectives of the layers of one attention kind."""
    layout, calls = rows.layout, rows.layers
    shared = rows.run(rows.whole) + rows.run(rows.pass_kv_rows) + rows.run(rows.pass_q_rows)
    own_heads, group_heads = len(rows.own.heads[rows.index][0]), rows.group_heads
    if shared:
        yield all_gather("attention: queries", "dcp", layout.dcp, own_heads * shared * rows.query_bytes, calls)
    if rows.whole:
        yield all_gather("attention: parts", "cp", layout.cp, group_heads * rows.run(rows.whole) * rows.part_bytes, calls)
    if rows.split:
        yield from _pass_kv(rows, calls)
    if rows.pass_q_rows:
        mine = rows.run(rows.pass_q_rows) * group_heads
        everybody = group_heads * sum(rows.run(rows.pass_q_rows, rank) for rank in range(layout.cp))
        yield all_gather("attention: passed queries", "cp", layout.cp, mine * rows.query_bytes, calls)
        sent = everybody * rows.part_bytes
        yield all_to_all("attention: their parts", "cp", layout.cp, sent, mine * rows.part_bytes, calls)
    if shared:
        sent = group_heads * shared * rows.part_bytes
        to_self = own_heads * shared * rows.part_bytes
        yield all_to_all("attention: parts of queries", "dcp", layout.dcp, sent, to_self, calls)


def _pass_kv(rows: _Step, calls: int) -> Iterator[TrafficEntry]:
    """Yields the exchange of keys and values of split rows, by ring or all-gather as `cp_style` sets."""
    cp, here = rows.layout.cp, rows.coords.cp
    where = "attention: keys and values"
    if rows.layout.cp_style == "allgather":
        yield all_gather(where, "cp", cp, rows.passed_kv_bytes(here), calls)
        return
    for kv_step in range(cp - 1):
        yield send(where, "cp", cp, rows.passed_kv_bytes((here - kv_step) % cp), calls)
        yield recv(where, "cp", cp, rows.passed_kv_bytes((here - kv_step - 1) % cp), calls)
