"""The explanation of a layout for a model: what each rank holds, its groups, the traffic of a step, and the memory.

It is a value made from the header of a checkpoint. `as_json` returns its machine-readable form,
`placement.explain.explain_text` the text form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from placement.cost.activations import StepLimits
from placement.cost.balance import MEASURE, Balance, balance, bubble
from placement.cost.collectives import TrafficEntry
from placement.cost.memory import RankMemory, parameter_bytes, parameter_count, rank_memories
from placement.cost.step_shape import StepShape
from placement.cost.traffic import rank_step_of, traffic
from placement.layout import mesh
from placement.layout.layout import Layout
from placement.layout.lm_head import is_over_stage
from placement.layout.mesh import Coords
from placement.model.spec import DType, ModelSpec
from placement.ownership.shard import Shard
from placement.ownership.shards import parameters
from placement.ownership.weight_slices import Parameter


@dataclass(frozen=True)
class RankView:
    """One rank: its coordinates, its weights, and the maximum bytes of its share of the step's KV cache (in whole blocks).

    `num_hidden` is the number of tokens whose hidden states the rank holds between layers: only its own ones if the step is
    scattered (sequence parallelism).
    """

    world_rank: int
    coords: Coords
    own: Shard
    memory: RankMemory
    kv_bytes: int
    num_hidden: int

    @property
    def total_bytes(self) -> int:
        """Bytes of the rank's weights, of the step's activations, and of its share of the step's KV cache together."""
        return self.memory.fixed_bytes + self.kv_bytes


@dataclass(frozen=True)
class Explanation:
    """One replica of `spec` under `layout` in one step. Weights, KV cache and hidden states all have the type
    ``step.dtype``."""

    spec: ModelSpec
    layout: Layout
    step: StepShape
    ranks: tuple[RankView, ...]
    groups: dict[str, list[list[int]]]
    traffic: list[tuple[TrafficEntry, tuple[int, ...]]]
    balance: Balance


def explain(spec: ModelSpec, layout: Layout, step: StepShape) -> Explanation:
    """Returns what each rank of one replica holds, its process groups, and the traffic, memory and balance of one step. The
    layout must have passed `placement.legality.check`; `step` has the rows of all DP ranks and the data type of weights and KV
    cache."""
    memories = rank_memories(spec, layout, step.dtype, limits=_limits(step, layout))
    ranks = tuple(_rank(spec, layout, memory, step) for memory in memories)
    groups = {axis: mesh.groups(layout, axis) for axis in _axes(spec, layout)}
    return Explanation(spec, layout, step, ranks, groups, traffic(spec, layout, step), balance(spec, layout))


def _limits(step: StepShape, layout: Layout) -> StepLimits:
    """Returns the tokens and sequences of the DP rank that has most of them in `step`, and the length of the longest row."""
    of_dp_ranks = [step.of_dp_rank(dp_rank).rows for dp_rank in range(layout.attn_dp)]
    tokens = max(sum(row.tokens for row in rows) for rows in of_dp_ranks)
    return StepLimits(tokens, max(map(len, of_dp_ranks)), max((row.context + row.tokens for row in step.rows), default=0))


def _axes(spec: ModelSpec, layout: Layout) -> tuple[str, ...]:
    axes = mesh.GROUP_AXES if spec.moe is None else (*mesh.GROUP_AXES, *mesh.MOE_GROUP_AXES)
    return (*axes, mesh.HEAD_AXIS) if is_over_stage(spec, layout) else axes


def shown_layer(spec: ModelSpec, own: Shard) -> int:
    """Returns the index of the layer that represents all layers of the rank with the shard `own`: its first MoE layer, or else
    its first layer."""
    return next((layer for layer in own.layers if spec.moe_of(layer)), own.layers.start)


def layer_parameters(spec: ModelSpec, own: Shard) -> Iterator[tuple[str, Parameter]]:
    """Yields the parameters of one layer (`shown_layer`) of the rank with the shard `own`, each with its name within the layer,
    for example ``attn.qkv.weight``."""
    start = f"layers.{shown_layer(spec, own)}."
    for row in parameters(spec, own):
        if row.name.startswith(start):
            yield row.name.removeprefix(start), row


def as_json(explained: Explanation, name: str) -> dict[str, Any]:
    """Returns the explanation of a layout as plain values that can be written as JSON; `name` is the model's name in it.

    The keys are ``model``, ``layout``, ``layout_fields``, ``world``, ``devices``, ``step``, ``ranks``, ``groups``, ``traffic``,
    ``layer`` (a typical layer on each rank of the first stage), ``memory``, ``balance`` and ``bubble``. Sizes are in bytes and
    not rounded; those of expert dispatch are expected values, since they depend on the router.
    """
    spec, layout, step = explained.spec, explained.layout, explained.step
    return {
        "model": {"name": name, "parameters": parameter_count(spec), **spec.model_dump(mode="json", exclude={"rope"})},
        "context": {"tokens": spec.max_position, "from": context_source(spec)},
        "layout": str(layout),
        "layout_fields": layout.model_dump(mode="json"),
        "world": layout.world,
        "devices": layout.devices,
        "step": {
            "batch": len(step.rows),
            "tokens": [row.tokens for row in step.rows],
            "context": [row.context for row in step.rows],
            "dp_rank": [row.dp_rank for row in step.rows],
            "dtype": step.dtype,
        },
        "ranks": [_rank_json(spec, view) for view in explained.ranks],
        "groups": explained.groups,
        "traffic": [_traffic_json(entry, ranks) for entry, ranks in explained.traffic],
        "layer": [_layer_json(spec, view, step.dtype) for view in explained.ranks if view.coords.pp == 0],
        "memory": _memory_json(explained),
        "balance": {"measure": MEASURE, **asdict(explained.balance)},
        "bubble": {str(count): bubble(layout.pp, count) for count in micro_batch_counts(layout)},
    }


def context_source(spec: ModelSpec) -> str:
    """Returns what the model's context length in tokens follows from, as text: its RoPE scaling (``32,768 x 4 (yarn)``), or the
    field that states it."""
    rope = spec.rope
    original = rope.original_max_position or 0
    if rope.kind in ("yarn", "dynamic") and int(original * rope.factor) == spec.max_position:
        return f"{original:,} x {rope.factor:g} ({rope.kind})"
    return "as the file states (max_position_embeddings, in GGUF context_length)"


def micro_batch_counts(layout: Layout) -> tuple[int, ...]:
    """Returns the numbers of micro-batches in flight for which the pipeline bubble is shown: 1, ``2 * pp`` and ``8 * pp``; an
    empty tuple without pipeline stages."""
    return (1, 2 * layout.pp, 8 * layout.pp) if layout.pp > 1 else ()


def _rank(spec: ModelSpec, layout: Layout, memory: RankMemory, step: StepShape) -> RankView:
    rank_step = rank_step_of(spec, layout, memory.world_rank, step)
    blocks = sum(memory.blocks_of(row.context + row.tokens) for row in rank_step.step.rows)
    return RankView(
        memory.world_rank, rank_step.coords, rank_step.own, memory, blocks * memory.block_bytes, rank_step.num_hidden
    )


def _rank_json(spec: ModelSpec, view: RankView) -> dict[str, Any]:
    own = view.own
    others = {
        f"{kind.label.strip()}_{name}": list(held)
        for kind, both in zip(spec.kinds[1:], own.heads[1:], strict=True)
        for name, held in zip(("q_heads", "kv_heads"), both, strict=True)
    }
    return {
        "world_rank": view.world_rank,
        "coords": asdict(view.coords),
        "layers": list(own.layers),
        "q_heads": list(own.q_heads),
        "kv_heads": list(own.kv_heads),
        **others,
        "experts": list(own.experts),
        "expert_columns": [own.expert_columns.start, own.expert_columns.stop],
        "columns": [own.columns.start, own.columns.stop],
        "vocabulary": [own.vocab.start, own.vocab.stop],
        "head_vocabulary": [own.head_vocab.start, own.head_vocab.stop],
        "weight_bytes": view.memory.weight_bytes,
        "kv_bytes_per_token": view.memory.kv_bytes_per_token,
        "hidden_tokens": view.num_hidden,
    }


def _layer_json(spec: ModelSpec, view: RankView, dtype: DType) -> dict[str, Any]:
    """Returns one layer on one tp rank: each parameter, and the slices of the checkpoint tensors that make it up."""
    rows = dict(layer_parameters(spec, view.own))
    return {
        "world_rank": view.world_rank,
        "bytes": sum(parameter_bytes(row, dtype) for row in rows.values()),
        "parameters": [
            {
                "name": name,
                "shape": row.shape,
                "bytes": parameter_bytes(row, dtype),
                "slices": [
                    {"source": weight_slice.source, "source_shape": weight_slice.source_shape, "shape": weight_slice.shape}
                    for weight_slice in row.slices
                ],
            }
            for name, row in rows.items()
        ],
    }


def _traffic_json(entry: TrafficEntry, ranks: Sequence[int]) -> dict[str, Any]:
    """Returns one traffic entry. `payload_bytes` and `wire_bytes_per_rank` are those of one call; the total is that of all
    `calls` of one of the `ranks`."""
    total = entry.calls * entry.wire_bytes_per_rank
    return {**asdict(entry), "total_wire_bytes_per_rank": total, "ranks": list(ranks)}


def _memory_json(explained: Explanation) -> dict[str, Any]:
    views = explained.ranks
    return {
        "ranks": [
            {
                "world_rank": view.world_rank,
                "weight_bytes": view.memory.weight_bytes,
                "activation_bytes": view.memory.activation_bytes,
                "kv_bytes": view.kv_bytes,
                "total_bytes": view.total_bytes,
            }
            for view in views
        ],
        "weight_bytes": sum(view.memory.weight_bytes for view in views),
        "activation_bytes": sum(view.memory.activation_bytes for view in views),
        "kv_bytes": sum(view.kv_bytes for view in views),
        "total_bytes": sum(view.total_bytes for view in views),
    }
