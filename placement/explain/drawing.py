"""Drawings of a layout in plain text: the grid of ranks, and the path of the hidden states through one layer.

        tp 0              tp 1
     ┌─────────────────┬─────────────────┐
pp 0 │ rank 0          │ rank 1          │       a cell is a rank, a row of cells a tp group
     │ layers 0-14     │ layers 0-14     │
     ├─────────────────┼─────────────────┤
pp 1 │ rank 2          │ rank 3          │
     │ layers 15-29    │ layers 15-29    │
     └─────────────────┴─────────────────┘
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from placement.cost.collectives import TrafficEntry
from placement.cost.memory import parameter_bytes
from placement.cost.units import size_text
from placement.explain.explanation import Explanation, RankView, layer_parameters, shown_layer
from placement.layout.lm_head import is_over_stage
from placement.layout.mesh import AXES
from placement.model.attention_kind import AttentionKind
from placement.model.spec import ModelSpec
from placement.ownership.shard import Shard
from placement.ownership.weight_slices import Parameter

_WIDEST = 116
"""Maximum number of characters in a line; a wider tp group continues below."""

_BEFORE = {"attn.qkv.weight": "attention input", "attn.qkv_a.weight": "attention input"}
_CONTEXT = "attention:"
_AFTER = {"attn.qkv.weight": _CONTEXT, "attn.kv_b.weight": _CONTEXT, "attn.o.weight": "attention output"}
"""Collectives drawn before or after a matrix of attention, by the start of their region's name."""


def grid(explained: Explanation) -> Iterator[str]:
    """Yields the lines of a drawing of the rank grid, with the tp axis across and the other axes down; each cell has the
    layers, heads, columns and memory of a rank."""
    layout = explained.layout
    cells = [_cell(explained, view) for view in explained.ranks]
    width = max(len(line) for cell in cells for line in cell)
    down = [axis for axis in AXES[:-1] if getattr(layout, axis) > 1]
    labels = [" ".join(f"{axis} {getattr(view.coords, axis)}" for axis in down) for view in explained.ranks[:: layout.tp]]
    margin = max(map(len, labels))
    across = max(1, (_WIDEST - margin) // (width + 3))
    for first in range(0, layout.tp, across):
        members = range(first, min(first + across, layout.tp))
        rows = [[cells[start + tp] for tp in members] for start in range(0, layout.world, layout.tp)]
        if first:
            yield ""
        yield " " * (margin + 3) + "".join(f"tp {tp}".ljust(width + 3) for tp in members).rstrip()
        yield from _table(rows, labels, margin, width)


def layer_path(explained: Explanation, rank: int) -> Iterator[str]:
    """Yields the lines of a drawing of one layer on the world rank `rank`: the shapes and bytes of its weights, and the
    collectives of the step in their places. Raises `IndexError` if there is no such rank."""
    spec, view, step = explained.spec, explained.ranks[rank], explained.step
    sent = [entry for entry, makers in explained.traffic if rank in makers]
    tokens = view.num_hidden
    hidden = f"hidden [{tokens:,} token{'' if tokens == 1 else 's'}, {spec.hidden_size:,}]"
    yield hidden
    rows = dict(layer_parameters(spec, view.own))
    mlp = [name for name in rows if name.startswith("mlp.")]
    before = _BEFORE | {mlp[0]: "mlp input"}
    after = _AFTER | {mlp[-1]: "mlp output"}
    wide = max(14, *(len(name.removesuffix(".weight")) for name in rows))
    index = spec.kind_of(shown_layer(spec, view.own))
    kind = spec.kinds[index]
    after |= {name: kind.label + region for name, region in after.items() if region == _CONTEXT}
    for name, row in rows.items():
        yield from _collectives(sent, before.get(name))
        yield f"│  {name.removesuffix('.weight'):<{wide}}  {_shape(row)}  {size_text(parameter_bytes(row, step.dtype))}"
        if name in ("attn.qkv.weight", "attn.kv_b.weight"):
            heads = f"{kind.label}{_heads(spec, view.own, index)} of {_head_sizes(spec, kind)}"
            yield f"│  {'attention':<{wide}}  {heads}"
        yield from _collectives(sent, after.get(name))
        if name in ("attn.o.weight", mlp[-1]):
            yield "│  + residual"
    yield hidden


def _shape(row: Parameter) -> str:
    """Returns a parameter's shape and the parts it is stacked from: ``[1,408, 576]  = 704 + 704``.

    If the parameter has several slots, the parts are those of the first one.
    """
    parts = [
        f"{weight_slice.shape[weight_slice.dim]:,}" for weight_slice in row.slices if weight_slice.slot == row.slices[0].slot
    ]
    shape = ", ".join(f"{size:,}" for size in row.shape)
    return f"[{shape}]  = {' + '.join(parts)}" if len(parts) > 1 else f"[{shape}]"


def runs_text(numbers: range) -> str:
    """Returns a non-empty range as text, with both ends included: ``0-14``, or ``7`` for a single number."""
    return f"{numbers.start}-{numbers.stop - 1}" if len(numbers) > 1 else str(numbers.start)


def _cell(explained: Explanation, view: RankView) -> list[str]:
    own, memory = view.own, view.memory
    return [
        f"rank {view.world_rank}",
        f"layers {runs_text(own.layers)}",
        *(kind.label + _heads(explained.spec, own, index) for index, kind in enumerate(explained.spec.kinds)),
        *(_columns(explained.spec, own)),
        *_vocabulary(explained, own),
        f"weights {size_text(memory.weight_bytes)}",
        f"KV {memory.kv_bytes_per_token:,} B a token",
    ]


def _vocabulary(explained: Explanation, own: Shard) -> Iterator[str]:
    """Yields the vocabulary rows of a rank. Embedding and LM head have the same rows unless the head is split over all DP
    ranks."""
    if is_over_stage(explained.spec, explained.layout):
        yield f"embedding {runs_text(own.vocab)}" if own.first_stage else "no embedding"
        yield f"head {runs_text(own.head_vocab)}" if own.last_stage else "no head"
    else:
        yield f"vocabulary {runs_text(own.vocab)}" if own.first_stage or own.last_stage else "no vocabulary"


def _columns(spec: ModelSpec, own: Shard) -> Iterator[str]:
    """Yields a rank's columns of the MLPs and its experts, with the same number of lines on every rank."""
    if "MLP" in spec.widths:
        yield f"{len(own.columns):,} columns"
    if spec.moe is not None:
        yield f"{len(own.experts):,} expert{'' if len(own.experts) == 1 else 's'} of {len(own.expert_columns):,} columns"


def _heads(spec: ModelSpec, own: Shard, kind: int) -> str:
    queries, kv = own.heads[kind]
    keys = f"kv {runs_text(kv)}" if spec.mla is None else "latents"
    return f"q head{'' if len(queries) == 1 else 's'} {runs_text(queries)}, {keys}"


def _head_sizes(spec: ModelSpec, kind: AttentionKind) -> str:
    if spec.mla is not None:
        return f"{kind.cached_dim} values a token"
    return f"{kind.key_dim}" + (f", values of {kind.value_dim}" if kind.value_dim != kind.key_dim else "")


def _table(rows: Sequence[Sequence[Sequence[str]]], labels: Sequence[str], margin: int, width: int) -> Iterator[str]:
    """Yields cells in boxes, each row of cells with its label at the first line."""
    bars = ["─" * (width + 2)] * len(rows[0])
    blank = " " * margin
    yield f"{blank} ┌{'┬'.join(bars)}┐"
    for index, (row, label) in enumerate(zip(rows, labels, strict=True)):
        if index:
            yield f"{blank} ├{'┼'.join(bars)}┤"
        for line, parts in enumerate(zip(*row, strict=True)):
            body = "│".join(f" {part.ljust(width)} " for part in parts)
            yield f"{label.ljust(margin) if line == 0 else blank} │{body}│"
    yield f"{blank} └{'┴'.join(bars)}┘"


def _collectives(sent: Sequence[TrafficEntry], region: str | None) -> Iterator[str]:
    for entry in sent:
        if region is not None and entry.where.startswith(region):
            yield (
                f"├─ {entry.op} over {entry.group_size} {entry.axis} ranks: {entry.payload_bytes:,} B, "
                f"{entry.wire_bytes_per_rank:,} B on the wire per rank"
            )
