"""The rules of a legal layout, one function each. Callers use `placement.legality.check`, which applies all of them.

A rule yields one sentence, with the conflicting numbers, for each way in which it is broken; `check` adds legal alternatives.

Uneven splits are legal (9 query heads on 2 ranks, 5 ranks on 3 KV heads). A rank needs at least one query head, one MLP column
and one vocabulary row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from placement.layout.layout import Layout, text_of
from placement.layout.lm_head import head_can_be_sharded
from placement.legality import suggestions
from placement.legality.dcp_sizes import legal_dcp, legal_dcp_of_kind
from placement.legality.expert_rules import EXPERT_RULES
from placement.model.spec import ModelSpec
from placement.nodes.hardware import ClusterSpec
from placement.ownership.shards import heads

Broken = tuple[str, str]
"""Pair of the field at fault and a sentence that describes the fault."""

_WIDTH_FIELDS = {
    "MLP": "intermediate_size",
    "shared expert": "shared_expert_intermediate_size, or moe_intermediate_size times n_shared_experts",
}
"""Fields of config.json with the sizes of `ModelSpec.widths`."""
_KV_FIELDS = {"": "num_key_value_heads", "window ": "swa_num_key_value_heads"}
"""Fields of config.json with the number of KV heads of each attention kind, by `AttentionKind.label`."""


def broken(layout: Layout, spec: ModelSpec, cluster: ClusterSpec | None) -> list[Broken]:
    """Returns the field at fault and a sentence for every broken rule, without suggestions. The rules of the cluster are
    checked only if it is not None."""
    on_model = [found for rule in MODEL_RULES for found in rule(layout, spec)]
    on_cluster = [found for rule in CLUSTER_RULES for found in rule(layout, cluster)] if cluster is not None else []
    return on_model + on_cluster


def a_query_head_per_rank(layout: Layout, spec: ModelSpec) -> Iterator[Broken]:
    """Checks that every tp rank has a query head: the heads of a KV group may be split over ranks, a single head may not;
    yields the field at fault and a sentence if not."""
    if layout.tp > spec.num_heads:
        yield "tp", f"tp={layout.tp} is more than the {spec.num_heads} query heads (num_attention_heads) of the model"


def a_column_per_rank(layout: Layout, spec: ModelSpec) -> Iterator[Broken]:
    """Checks that every tp rank has a column of every MLP and of the shared expert; yields the field at fault and a sentence
    for each that has too few."""
    for name, width in spec.widths.items():
        if layout.tp > width:
            yield "tp", f"tp={layout.tp} is more than the {width} {name} columns ({_WIDTH_FIELDS[name]}) of the model"


def a_vocabulary_row_per_rank(layout: Layout, spec: ModelSpec) -> Iterator[Broken]:
    """Checks that every tp rank has a row of the embedding and of the head; yields the field at fault and a sentence if not."""
    if layout.tp > spec.vocab_size:
        yield "tp", f"tp={layout.tp} is more than the {spec.vocab_size} vocabulary rows (vocab_size) of the model"


def a_layer_per_stage(layout: Layout, spec: ModelSpec) -> Iterator[Broken]:
    """Checks that every pipeline stage has at least one layer; yields the field at fault and a sentence if not."""
    if layout.pp > spec.num_layers:
        yield "pp", f"pp={layout.pp} is more than the {spec.num_layers} layers (num_hidden_layers) of the model"


def stage_layers_add_up(layout: Layout, spec: ModelSpec) -> Iterator[Broken]:
    """Checks that an explicit `stage_layers` covers every stage and every layer; yields the field at fault and a sentence for
    each of the two that it does not."""
    given = layout.stage_layers
    if given is None:
        return
    text = "/".join(map(str, given))
    if len(given) != layout.pp:
        yield "stage_layers", f"stage_layers={text} names {len(given)} stages, but pp={layout.pp}"
    if sum(given) != spec.num_layers:
        yield "stage_layers", f"stage_layers={text} adds up to {sum(given)} layers, but the model has {spec.num_layers}"


def a_share_per_tp_rank(layout: Layout, spec: ModelSpec) -> Iterator[Broken]:
    """Checks that `tp_shares` has one share per tp rank; yields the field at fault and a sentence if it has not.

    The sizes of the shares are free: the split gives each rank at least one query head, one MLP column and one vocabulary row.
    """
    given = layout.tp_shares
    if given is not None and len(given) != layout.tp:
        yield "tp_shares", f"tp_shares={text_of(given)} names {len(given)} tp ranks, but tp={layout.tp}"


def sp_has_tokens_to_split(layout: Layout, spec: ModelSpec) -> Iterator[Broken]:
    """Checks that sequence parallelism has a tp group of several ranks over which to split tokens; yields the field at fault
    and a sentence if not."""
    if layout.sp and layout.tp == 1:
        yield "sp", "sp=true splits the tokens of norms and residual sums over the tp ranks, but tp=1"


def dcp_groups_share_a_kv_head(layout: Layout, spec: ModelSpec) -> Iterator[Broken]:
    """Checks that all ranks of a dcp group hold the same KV head, whose positions they split between them; yields the field at
    fault and a sentence if not."""
    shares = layout.tp_shares if layout.tp_shares and len(layout.tp_shares) == layout.tp else None
    legal = legal_dcp(spec, layout.tp, shares) if layout.tp <= spec.num_heads else [layout.dcp]
    if layout.dcp in legal:
        return
    kind = next(kind for kind in spec.kinds if layout.dcp not in legal_dcp_of_kind(kind, layout.tp, shares))
    kv_heads = f"the {kind.num_kv_heads} KV heads ({_KV_FIELDS[kind.label]}) of the model"
    if spec.mla is not None:
        why = f"all {layout.tp} tp ranks hold the same latents, so it must divide tp"
    elif layout.tp <= kind.num_kv_heads:
        why = f"tp={layout.tp} is no more than {kv_heads}, so no two ranks hold the same head"
    else:
        holders = Counter(own.start for _, own in heads(kind, layout.tp, shares)).values()
        why = f"tp={layout.tp} puts {kv_heads} on {', '.join(map(str, holders))} ranks, and a dcp group must not span two heads"
    sizes = f"; with tp={layout.tp} dcp can be {suggestions.sizes(legal)}" if len(legal) > 1 else ""
    yield "dcp", f"dcp={layout.dcp} cannot be used: {why}{sizes}"


def a_style_needs_cp(layout: Layout, spec: ModelSpec) -> Iterator[Broken]:
    """Checks that `cp_style` is the default, ``ring``, without context parallelism (``cp=1``), where it would have no effect;
    yields the field at fault and a sentence if not.
    """
    if layout.cp_style != "ring" and layout.cp == 1:
        yield "cp_style", f"cp_style={layout.cp_style} says how cp ranks exchange keys and values, but cp=1"


def devices_exist(layout: Layout, cluster: ClusterSpec) -> Iterator[Broken]:
    """Checks that the cluster has one slot per rank of all replicas; yields the field at fault and a sentence if not."""
    if layout.devices > cluster.slots:
        product = f"replicas={layout.replicas} x pp={layout.pp} x {layout.stage_ranks} ranks a stage"
        nodes = f"{len(cluster.nodes)} node{'' if len(cluster.nodes) == 1 else 's'}"
        yield (
            _largest_axis(layout),
            f"{layout} needs {layout.devices} devices ({product}), but the cluster has {cluster.slots} slots on {nodes}",
        )


def tp_groups_fit_in_nodes(layout: Layout, cluster: ClusterSpec) -> Iterator[Broken]:
    """Checks that all tp groups fit into nodes; yields the field at fault and a sentence if not. A group never spans nodes, so
    slots left on several nodes do not combine."""
    largest = cluster.largest_node
    groups, room = layout.devices // layout.tp, cluster.tp_groups(layout.tp)
    if largest is None or layout.tp > largest.slots:
        most = f"the largest, {largest.name}, has {largest.slots} slots" if largest else "the cluster has none"
        yield "tp", f"tp={layout.tp} does not fit inside one node: {most}"
    elif groups > room and layout.devices <= cluster.slots:
        yield (
            "tp",
            f"{layout} makes {groups} tp groups of {layout.tp} ranks, but only {room} fit: "
            f"a group never spans nodes, and the nodes have {suggestions.sizes(node.slots for node in cluster.nodes)} slots",
        )


def _largest_axis(layout: Layout) -> str:
    """Returns the name of the largest axis, which is reported if the layout needs too many devices."""
    return max(("replicas", "pp", "attn_dp", "cp", "tp"), key=lambda axis: int(getattr(layout, axis)))


MODEL_RULES: tuple[Callable[[Layout, ModelSpec], Iterator[Broken]], ...] = (
    a_query_head_per_rank,
    a_column_per_rank,
    a_vocabulary_row_per_rank,
    a_layer_per_stage,
    stage_layers_add_up,
    a_share_per_tp_rank,
    sp_has_tokens_to_split,
    dcp_groups_share_a_kv_head,
    a_style_needs_cp,
    head_can_be_sharded,
    *EXPERT_RULES,
)
CLUSTER_RULES: tuple[Callable[[Layout, ClusterSpec], Iterator[Broken]], ...] = (devices_exist, tp_groups_fit_in_nodes)
