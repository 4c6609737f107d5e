"""Who owns which slice of the model: the single source of truth for ownership.

Weight loading, KV size, memory estimates, transfers and pictures read this file; nobody re-derives a slice.

SmolLM2-135M (9 query heads in 3 KV groups, 1,536 MLP columns) under ``tp=2``::

                 tp_rank 0                tp_rank 1
    KV groups    [0 1]  (6 q heads)       [2]  (3 q heads)
    MLP columns  [0 .. 704)               [704 .. 1536)   <- the rank short of attention work gets more MLP
    vocabulary   [0 .. 24576)             [24576 .. 49152)

The unit of an attention split is a KV group (one KV head and the query heads that read it), so a rank's query heads
always find their KV heads on the same rank. With more ranks than KV heads, each KV head is held by several ranks and
its query heads are dealt over them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from placement.dealing import Shares, deal, level, split_hands
from placement.layout import Layout
from placement.mesh import Coords
from placement.model_spec import ModelSpec

_BLOCKS = (64, 32, 16, 8, 4, 2, 1)
"""Sizes, largest first, in which MLP columns and vocabulary rows are dealt."""


@dataclass(frozen=True)
class Shard:
    """What one rank holds. Ranges index the whole model; `vocab` may reach past ``vocab_size`` into padding rows."""

    layers: range
    q_heads: range
    kv_heads: range
    columns: range
    vocab: range
    first_stage: bool
    last_stage: bool


@dataclass(frozen=True)
class Piece:
    """One slice of one checkpoint tensor and where it lands in a rank's parameter.

    ``target.narrow(dim, at, len(take))`` receives ``source.narrow(dim, take.start, len(take))``.
    `source` is the Hugging Face name of the tensor, `source_shape` its whole shape.
    """

    source: str
    source_shape: tuple[int, ...]
    dim: int
    take: range
    at: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        return (*self.source_shape[: self.dim], len(self.take), *self.source_shape[self.dim + 1 :])


@dataclass(frozen=True)
class Parameter:
    """A rank's parameter: its local shape and the pieces that fill it. Rows no piece covers are padding, and zero."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def shard(spec: ModelSpec, layout: Layout, at: Coords) -> Shard:
    """The shard of the rank at `at`. The layout must have passed `layout.check`."""
    first = sum(stage_layers(spec, layout)[: at.pp])
    shares = layout.tp_shares
    q_heads, kv_heads = heads(spec, layout.tp, shares)[at.tp]
    return Shard(
        layers=range(first, first + stage_layers(spec, layout)[at.pp]),
        q_heads=q_heads,
        kv_heads=kv_heads,
        columns=columns(spec, layout.tp, shares)[at.tp],
        vocab=vocabulary(spec, layout.tp, shares)[at.tp],
        first_stage=at.pp == 0,
        last_stage=at.pp == layout.pp - 1,
    )


def stage_layers(spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
    """Number of layers of each pipeline stage.

    Unless given by hand, the remainder goes to the middle stages first, then the first: the last stage also carries
    the head and the first the embedding.
    """
    if layout.stage_layers is not None:
        return layout.stage_layers
    each, extra = divmod(spec.num_layers, layout.pp)
    middle_first = sorted(range(layout.pp), key=lambda stage: (stage == layout.pp - 1, stage == 0, stage))
    longer = set(middle_first[:extra])
    return tuple(each + (stage in longer) for stage in range(layout.pp))


def heads(spec: ModelSpec, tp: int, shares: Shares = None) -> list[tuple[range, range]]:
    """(query heads, KV heads) of each tp rank. Both are contiguous; every query head's KV head is on its rank.

    By `shares` where they are given: whole KV groups, or where there are more ranks than those, the heads of each group.
    """
    per_kv = spec.queries_per_kv
    if tp <= spec.num_kv_heads:
        return [(range(kv.start * per_kv, kv.stop * per_kv), kv) for kv in deal(spec.num_kv_heads, tp, shares)]
    return [
        (range(kv * per_kv + part.start, kv * per_kv + part.stop), range(kv, kv + 1))
        for kv, holders in enumerate(split_hands(per_kv, spec.num_kv_heads, tp, shares))
        for part in deal(per_kv, len(holders), shares and shares[holders.start : holders.stop])
    ]


def columns(spec: ModelSpec, tp: int, shares: Shares = None) -> list[range]:
    """MLP columns of each tp rank, dealt so that attention and MLP weights together follow the shares (or are even) as
    nearly as they can: a rank that got more heads than its due gets fewer columns."""
    attention = [
        (2 * len(q_heads) + 2 * len(kv_heads)) * spec.head_dim * spec.hidden_size
        for q_heads, kv_heads in heads(spec, tp, shares)
    ]
    block = _block(spec.intermediate_size, tp)
    return level(spec.intermediate_size // block, block, attention, 3 * spec.hidden_size, shares)


def vocabulary(spec: ModelSpec, tp: int, shares: Shares = None) -> list[range]:
    """Vocabulary rows of each tp rank, the same for the embedding and the head. Together they cover the padded size."""
    block = next(size for size in _BLOCKS if size == 1 or spec.vocab_size >= 8 * size * tp)
    blocks = deal(-(-spec.vocab_size // block), tp, shares)
    return [range(hand.start * block, hand.stop * block) for hand in blocks]


def parameters(spec: ModelSpec, own: Shard) -> Iterator[Parameter]:
    """Every parameter of one rank, in the order of the forward pass."""
    hidden, vocab = spec.hidden_size, spec.vocab_size
    if own.first_stage:
        yield _rows("embed.weight", hidden, ("model.embed_tokens.weight", vocab, own.vocab))
    for layer in own.layers:
        yield from _layer(spec, own, f"layers.{layer}", f"model.layers.{layer}")
    if own.last_stage:
        yield _whole("norm.weight", "model.norm.weight", hidden)
        if not spec.tie_embeddings:
            yield _rows("head.weight", hidden, ("lm_head.weight", vocab, own.vocab))
        elif not own.first_stage:
            yield _rows("head.weight", hidden, ("model.embed_tokens.weight", vocab, own.vocab))


def weight_elements(spec: ModelSpec, own: Shard) -> int:
    """Number of weight elements a rank holds, padding included."""
    return sum(_product(parameter.shape) for parameter in parameters(spec, own))


def _layer(spec: ModelSpec, own: Shard, here: str, there: str) -> Iterator[Parameter]:
    hidden, dim, wide = spec.hidden_size, spec.head_dim, spec.intermediate_size
    q_rows = range(own.q_heads.start * dim, own.q_heads.stop * dim)
    kv_rows = range(own.kv_heads.start * dim, own.kv_heads.stop * dim)
    qkv = [
        ("q", spec.num_heads * dim, q_rows),
        ("k", spec.num_kv_heads * dim, kv_rows),
        ("v", spec.num_kv_heads * dim, kv_rows),
    ]
    gate_up = [("gate", wide, own.columns), ("up", wide, own.columns)]

    yield _whole(f"{here}.input_norm.weight", f"{there}.input_layernorm.weight", hidden)
    yield _rows(
        f"{here}.attn.qkv.weight", hidden, *((f"{there}.self_attn.{n}_proj.weight", rows, take) for n, rows, take in qkv)
    )
    if spec.qkv_bias:
        yield _rows(f"{here}.attn.qkv.bias", None, *((f"{there}.self_attn.{n}_proj.bias", rows, take) for n, rows, take in qkv))
    if spec.qk_norm == "head":
        yield _whole(f"{here}.attn.q_norm.weight", f"{there}.self_attn.q_norm.weight", dim)
        yield _whole(f"{here}.attn.k_norm.weight", f"{there}.self_attn.k_norm.weight", dim)
    yield _inputs(f"{here}.attn.o.weight", f"{there}.self_attn.o_proj.weight", hidden, spec.num_heads * dim, q_rows)
    if spec.o_bias:
        yield _whole(f"{here}.attn.o.bias", f"{there}.self_attn.o_proj.bias", hidden)
    yield _whole(f"{here}.post_norm.weight", f"{there}.post_attention_layernorm.weight", hidden)
    yield _rows(
        f"{here}.mlp.gate_up.weight", hidden, *((f"{there}.mlp.{n}_proj.weight", rows, take) for n, rows, take in gate_up)
    )
    if spec.mlp_bias:
        yield _rows(
            f"{here}.mlp.gate_up.bias", None, *((f"{there}.mlp.{n}_proj.bias", rows, take) for n, rows, take in gate_up)
        )
    yield _inputs(f"{here}.mlp.down.weight", f"{there}.mlp.down_proj.weight", hidden, wide, own.columns)
    if spec.mlp_bias:
        yield _whole(f"{here}.mlp.down.bias", f"{there}.mlp.down_proj.bias", hidden)


def _rows(name: str, inputs: int | None, *segments: tuple[str, int, range]) -> Parameter:
    """Slices of output rows (of a matrix with `inputs` columns, or of a bias), stacked: column parallel."""
    tail = () if inputs is None else (inputs,)
    starts = accumulate((len(take) for _, _, take in segments), initial=0)
    pieces = tuple(
        Piece(source, (rows, *tail), 0, range(take.start, min(take.stop, rows)), at)
        for (source, rows, take), at in zip(segments, starts, strict=False)
        if take.start < rows
    )
    return Parameter(name, (sum(len(take) for _, _, take in segments), *tail), pieces)


def _inputs(name: str, source: str, rows: int, inputs: int, take: range) -> Parameter:
    """A slice of input columns: row parallel. Its output is a partial sum, its bias is added once, after the sum."""
    return Parameter(name, (rows, len(take)), (Piece(source, (rows, inputs), 1, take, 0),))


def _whole(name: str, source: str, size: int) -> Parameter:
    """A vector every rank of the group holds."""
    return Parameter(name, (size,), (Piece(source, (size,), 0, range(size), 0),))


def _block(total: int, hands: int) -> int:
    """Largest block that divides `total` and leaves every hand at least eight on average; 1 if none does."""
    return next((size for size in _BLOCKS if total % size == 0 and total // size >= 8 * hands), 1)


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
