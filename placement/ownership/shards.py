"""Shards of tensor parallelism (TP) and pipeline parallelism (PP): which rank owns which tensor-parallel slice of the model.

This file is the single source of truth: weight loading, KV sizes, memory estimates, transfers and drawings all use it.

SmolLM2-135M (9 query heads in 3 KV groups, 1,536 MLP columns) under ``tp=2``::

                 tp_rank 0                tp_rank 1
    KV groups    [0 1]  (6 q heads)       [2]  (3 q heads)
    MLP columns  [0 .. 704)               [704 .. 1536)   <- the rank with less attention work gets more MLP columns
    vocabulary   [0 .. 24576)             [24576 .. 49152)

The unit of an attention split is a KV group (one KV head and the query heads that use it), so a query head and its KV head are
always on the same rank. With more ranks than KV heads, each KV head is replicated on several ranks, and its query heads are
split over them. Latent attention (`placement.model.mla_spec`) has one KV head: every rank holds the latents. Layers of
different attention kinds (`placement.model.attention_kind`) are split kind by kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from placement.experts.expert_map import map_of
from placement.layout.layout import Layout
from placement.layout.lm_head import is_over_stage
from placement.layout.mesh import Coords, moe_coords_of, world_rank
from placement.layout.partition import Shares, partition, partition_balanced, partition_groups
from placement.layout.pipeline_stages import partition_layers
from placement.model.attention_kind import AttentionKind
from placement.model.moe_spec import MoESpec
from placement.model.spec import ModelSpec
from placement.ownership.expert_slices import expert_layer
from placement.ownership.latent_slices import head_elements, latent_attention
from placement.ownership.shard import Shard
from placement.ownership.weight_slices import Parameter, fused, inputs, of_heads, rows, whole

NORMS: dict[str, dict[str, str]] = {
    "pre": {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"},
    "post": {"attn_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"},
    "sandwich": {
        "input_norm": "input_layernorm",
        "attn_out_norm": "post_attention_layernorm",
        "post_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
    "sandwich_glm": {
        "input_norm": "input_layernorm",
        "attn_out_norm": "post_self_attn_layernorm",
        "post_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_mlp_layernorm",
    },
}
"""Norms of a layer by `ModelSpec.norms`: maps the parameter's name (see `actors.model.layers.layer.Layer`) to the name in the
checkpoint."""

_BLOCKS = (64, 32, 16, 8, 4, 2, 1)
"""Block sizes, largest first, in multiples of which MLP columns and vocabulary rows are split."""


def shard(spec: ModelSpec, layout: Layout, coords: Coords) -> Shard:
    """Returns the layers, heads, MLP columns, vocabulary rows and expert slots that the rank at `coords` holds, as index
    ranges. The layout must have passed `placement.legality.check`."""
    first = sum(stage_layers(spec, layout)[: coords.pp])
    shares = layout.tp_shares
    return Shard(
        layers=range(first, first + stage_layers(spec, layout)[coords.pp]),
        heads=tuple(heads(kind, layout.tp, shares)[coords.tp] for kind in spec.kinds),
        columns=columns(spec, layout.tp, shares)[coords.tp],
        vocab=vocabulary(spec, layout.tp, shares)[coords.tp],
        head_vocab=head_vocabulary(spec, layout)[coords.attn_dp * layout.tp + coords.tp],
        first_stage=coords.pp == 0,
        last_stage=coords.pp == layout.pp - 1,
        **_experts(spec, layout, coords),
    )


def _experts(spec: ModelSpec, layout: Layout, coords: Coords) -> dict[str, Any]:
    """Returns the expert fields of a shard, or nothing for a dense model."""
    if spec.moe is None:
        return {}
    seen = moe_coords_of(layout, world_rank(layout, coords))
    placed = map_of(spec.moe, layout)
    return {
        "expert_map": placed,
        "expert_slots": placed.ranges[seen.ep],
        "expert_columns": expert_columns(spec, spec.moe, layout)[seen.moe_tp],
        "shared_columns": shared_columns(spec, spec.moe, layout)[coords.tp],
    }


def stage_layers(spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
    """Returns the number of layers of each pipeline stage.

    It is the layout's `stage_layers`, or by default the split that minimises the largest stage
    (`placement.layout.pipeline_stages`), where the LM head counts with the last stage and the embedding with the first.
    """
    if layout.stage_layers is not None:
        return layout.stage_layers
    vocabulary_elements = spec.vocab_size * spec.hidden_size
    of_head = vocabulary_elements // (layout.attn_dp if is_over_stage(spec, layout) else 1)
    return partition_layers(_layer_elements(spec), layout.pp, embedding=vocabulary_elements, head=of_head)


@lru_cache(maxsize=16)
def _layer_elements(spec: ModelSpec) -> tuple[int, ...]:
    """Returns the number of weight elements of each layer."""
    everything = whole_model(spec)
    return tuple(
        sum(_product(parameter.shape) for parameter in _layer(spec, everything, layer)) for layer in range(spec.num_layers)
    )


def whole_model(spec: ModelSpec) -> Shard:
    """Returns the shard of a single rank that holds the whole model, without vocabulary padding."""
    return Shard(
        layers=range(spec.num_layers),
        heads=tuple((range(kind.num_heads), range(kind.num_kv_heads)) for kind in spec.kinds),
        columns=range(spec.intermediate_size),
        vocab=range(spec.vocab_size),
        head_vocab=range(spec.vocab_size),
        first_stage=True,
        last_stage=True,
        **_experts(spec, Layout(), Coords(0, 0, 0, 0)),
    )


def heads(kind: AttentionKind | ModelSpec, tp: int, shares: Shares = None) -> list[tuple[range, range]]:
    """Returns the pair (query heads, KV heads) of each of `tp` ranks in layers of an attention kind (for a model: of its first
    kind).

    Both are contiguous, and every query head is on a rank with its KV head. `shares` are the relative sizes of the tp ranks
    (None: equal): whole KV groups are split in proportion to them, or, if there are more ranks than groups, the query heads of
    each group.
    """
    per_kv = kind.queries_per_kv
    if tp <= kind.num_kv_heads:
        return [(range(kv.start * per_kv, kv.stop * per_kv), kv) for kv in partition(kind.num_kv_heads, tp, shares)]
    return [
        (range(kv * per_kv + part.start, kv * per_kv + part.stop), range(kv, kv + 1))
        for kv, holders in enumerate(partition_groups(per_kv, kind.num_kv_heads, tp, shares))
        for part in partition(per_kv, len(holders), shares and shares[holders.start : holders.stop])
    ]


def columns(spec: ModelSpec, tp: int, shares: Shares = None) -> list[range]:
    """Returns the MLP columns of dense layers on each of `tp` ranks.

    They are split so that attention and MLP weights together are as even, or as proportional to the shares, as possible: a rank
    with more attention heads than its share gets fewer columns. `shares` are the relative sizes of the tp ranks (None: equal).
    """
    return _balanced_columns(spec, spec.intermediate_size, 1, _attention_elements(spec, tp, shares), shares)


def expert_columns(spec: ModelSpec, moe: MoESpec, layout: Layout) -> list[range]:
    """Returns the columns that each moe_tp rank holds of each of its experts.

    If the moe_tp ranks are a tp group, the columns are split as by `columns`, with `top_k` experts per token. Otherwise experts
    and attention are split over different groups of ranks, and the columns are split evenly.
    """
    if not _expert_ranks_are_tp_ranks(layout):
        return _balanced_columns(spec, moe.expert_size, moe.top_k, [0] * layout.moe_tp, None)
    already = _attention_elements(spec, layout.tp, layout.tp_shares)
    return _balanced_columns(spec, moe.expert_size, moe.top_k, already, layout.tp_shares)


def shared_columns(spec: ModelSpec, moe: MoESpec, layout: Layout) -> list[range]:
    """Returns the columns of the shared expert on each tp rank, which even out the load that attention and experts leave; empty
    ranges if the model has no shared expert."""
    tp, shares = layout.tp, layout.tp_shares
    if not moe.shared_size:
        return [range(0)] * tp
    already = _attention_elements(spec, tp, shares)
    if _expert_ranks_are_tp_ranks(layout):
        routed = (3 * spec.hidden_size * moe.top_k * len(part) for part in expert_columns(spec, moe, layout))
        already = list(map(sum, zip(already, routed, strict=True)))
    return _balanced_columns(spec, moe.shared_size, 1, already, shares)


def _expert_ranks_are_tp_ranks(layout: Layout) -> bool:
    """Whether the moe_tp groups are the tp groups. Both axes are innermost in their grid, so equal sizes mean equal groups."""
    return layout.moe_tp == layout.tp


def _attention_elements(spec: ModelSpec, tp: int, shares: Shares) -> list[int]:
    """Returns the attention weight elements of a layer on each tp rank; the mean over the layers if there are several kinds."""
    if spec.mla is not None:  # replicated weights are equal on every rank and not counted
        return [len(q_heads) * head_elements(spec, spec.mla) for q_heads, _ in heads(spec, tp, shares)]
    layers = Counter(map(spec.kind_of, range(spec.num_layers)))
    per_kind = [
        (heads(kind, tp, shares), layers[index] * kind.cached_dim * spec.hidden_size) for index, kind in enumerate(spec.kinds)
    ]
    return [sum(sum(map(len, parts[rank])) * each for parts, each in per_kind) // spec.num_layers for rank in range(tp)]


def _balanced_columns(spec: ModelSpec, width: int, times: int, already: list[int], shares: Shares) -> list[range]:
    """Returns the columns of a gated MLP on each rank; a token passes through its three matrices `times` times."""
    block = _block(width, len(already))
    return partition_balanced(width // block, block, already, 3 * spec.hidden_size * times, shares)


def vocabulary(spec: ModelSpec, tp: int, shares: Shares = None) -> list[range]:
    """Returns the vocabulary rows of the embedding on each of `tp` ranks; together they cover the vocabulary, padded to whole
    blocks of rows. `shares` are the relative sizes of the tp ranks (None: equal)."""
    block = next(size for size in _BLOCKS if size == 1 or spec.vocab_size >= 8 * size * tp)
    blocks = partition(-(-spec.vocab_size // block), tp, shares)
    return [range(part.start * block, part.stop * block) for part in blocks]


def head_vocabulary(spec: ModelSpec, layout: Layout) -> list[range]:
    """Returns the vocabulary rows of the LM head on each rank of a stage, in order of DP ranks and then tp ranks (``[attn_dp *
    tp]``).

    They are those of the embedding, or are split over all DP ranks (`placement.layout.lm_head`).
    """
    if not is_over_stage(spec, layout):
        return vocabulary(spec, layout.tp, layout.tp_shares) * layout.attn_dp
    return vocabulary(spec, layout.attn_dp * layout.tp, layout.tp_shares and layout.tp_shares * layout.attn_dp)


def parameters(spec: ModelSpec, own: Shard) -> Iterator[Parameter]:
    """Yields every parameter (name, local shape, slices of checkpoint tensors) of the rank with the shard `own`, in the order
    of the forward pass."""
    hidden, vocab = spec.hidden_size, spec.vocab_size
    if own.first_stage:
        yield rows("embed.weight", hidden, ("model.embed_tokens.weight", vocab, own.vocab))
    for layer in own.layers:
        yield from _layer(spec, own, layer)
    if own.last_stage:
        yield whole("norm.weight", "model.norm.weight", hidden)
        if not spec.tie_embeddings:
            yield rows("head.weight", hidden, ("lm_head.weight", vocab, own.head_vocab))
        elif not own.first_stage:
            yield rows("head.weight", hidden, ("model.embed_tokens.weight", vocab, own.head_vocab))


def weight_elements(spec: ModelSpec, own: Shard) -> int:
    """Returns the number of weight elements that the rank with the shard `own` holds, padding rows included."""
    return sum(_product(parameter.shape) for parameter in parameters(spec, own))


def _layer(spec: ModelSpec, own: Shard, layer: int) -> Iterator[Parameter]:
    here, there, moe = f"layers.{layer}", f"model.layers.{layer}", spec.moe_of(layer)
    yield from _norms(spec, here, there, "input_norm")
    kind = spec.kind_of(layer)
    yield from _attention(spec, spec.kinds[kind], *own.heads[kind], f"{here}.attn", f"{there}.self_attn")
    if spec.has_sinks(layer):
        source = (f"{there}.self_attn.{spec.sinks_name}", spec.num_heads, own.heads[kind][0])
        yield replace(rows(f"{here}.attn.sinks", None, source), fp32=True)
    yield from _norms(spec, here, there, "attn_out_norm", "post_norm")
    if moe is None:
        yield from _mlp(spec, own, f"{here}.mlp", f"{there}.mlp")
    else:
        yield from expert_layer(spec, moe, own, here, there)
    yield from _norms(spec, here, there, "mlp_out_norm")


def _norms(spec: ModelSpec, here: str, there: str, *names: str) -> Iterator[Parameter]:
    """Yields the norms among `names` that the layers of this model have."""
    sources = NORMS[spec.norms]
    for name in names:
        if name in sources:
            yield whole(f"{here}.{name}.weight", f"{there}.{sources[name]}.weight", spec.hidden_size)


def _attention(
    spec: ModelSpec, kind: AttentionKind, q_heads: range, kv_heads: range, here: str, there: str
) -> Iterator[Parameter]:
    """Yields the attention parameters of a layer of one attention kind, on a rank with the given heads."""
    if spec.mla is not None:
        yield from latent_attention(spec, spec.mla, q_heads, here, there)
        return
    hidden, dim, value_dim = spec.hidden_size, kind.key_dim, kind.value_dim
    q_width, q_rows = kind.num_heads * dim, of_heads(q_heads, dim)
    k_width, k_rows = kind.num_kv_heads * dim, of_heads(kv_heads, dim)
    v_segment = ("v_proj", kind.num_kv_heads * value_dim, of_heads(kv_heads, value_dim))
    qkv = [("q_proj", q_width, q_rows), ("k_proj", k_width, k_rows), v_segment]
    qkv = fused("qkv_proj", qkv) if spec.fused_qkv else qkv
    yield rows(f"{here}.qkv.weight", hidden, *((f"{there}.{name}.weight", size, take) for name, size, take in qkv))
    if spec.qkv_bias:
        yield rows(f"{here}.qkv.bias", None, *((f"{there}.{name}.bias", size, take) for name, size, take in qkv))
    if spec.qk_norm == "head":
        yield whole(f"{here}.q_norm.weight", f"{there}.q_norm.weight", dim)
        yield whole(f"{here}.k_norm.weight", f"{there}.k_norm.weight", dim)
    if spec.qk_norm == "width":
        yield rows(f"{here}.q_norm.weight", None, (f"{there}.q_norm.weight", q_width, q_rows))
        yield rows(f"{here}.k_norm.weight", None, (f"{there}.k_norm.weight", k_width, k_rows))
    out_width, out_columns = kind.num_heads * value_dim, of_heads(q_heads, value_dim)
    yield inputs(f"{here}.o.weight", f"{there}.o_proj.weight", hidden, out_width, out_columns)
    if spec.o_bias:
        yield whole(f"{here}.o.bias", f"{there}.o_proj.bias", hidden)


def _mlp(spec: ModelSpec, own: Shard, here: str, there: str) -> Iterator[Parameter]:
    hidden, wide = spec.hidden_size, spec.intermediate_size
    gate_up = [("gate_proj", wide, own.columns), ("up_proj", wide, own.columns)]
    gate_up = fused("gate_up_proj", gate_up) if spec.fused_gate_up else gate_up
    yield rows(f"{here}.gate_up.weight", hidden, *((f"{there}.{name}.weight", size, take) for name, size, take in gate_up))
    if spec.mlp_bias:
        yield rows(f"{here}.gate_up.bias", None, *((f"{there}.{name}.bias", size, take) for name, size, take in gate_up))
    yield inputs(f"{here}.down.weight", f"{there}.down_proj.weight", hidden, wide, own.columns)
    if spec.mlp_bias:
        yield whole(f"{here}.down.bias", f"{there}.down_proj.bias", hidden)


def _block(total: int, parts: int) -> int:
    """Returns the largest block size that divides `total` and gives each part at least eight blocks on average; else 1."""
    return next((size for size in _BLOCKS if total % size == 0 and total // size >= 8 * parts), 1)


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
