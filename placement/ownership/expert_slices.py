"""Expert weights of an MoE layer on a rank, and the slices of checkpoint tensors that they are loaded from.

A rank stacks its experts, one per slot, and holds only its own columns of each (`Shard.experts`, `Shard.expert_columns`)::

    experts.gate_up  [slots, 2 * own columns, hidden]        experts.down  [slots, hidden, own columns]

Checkpoints store the experts in five forms (E experts of I columns)::

    each      experts.7.gate_proj, .up_proj [I, hidden], .down_proj [hidden, I]    one matrix per expert (Qwen, DeepSeek, GLM)
    mixtral   experts.7.w1, .w3, .w2                                               the same with other names
    fused     experts.gate_up_proj [E, 2I, hidden], .down_proj [E, hidden, I]      gate above up, as in transformers
    gpt_oss   experts.gate_up_proj [E, hidden, 2I], .down_proj [E, I, hidden]      transposed; gate and up columns interleaved
    stacked   experts.gate_proj, .up_proj [E, I, hidden], .down_proj [E, hidden, I]    GGUF
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from placement.model.moe_spec import ExpertTensorFormat, MoESpec
from placement.model.spec import ModelSpec
from placement.ownership.shard import Shard
from placement.ownership.weight_slices import Parameter, WeightSlice, inputs, rows, whole


@dataclass(frozen=True)
class _Names:
    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


_NAMES: dict[ExpertTensorFormat, _Names] = {
    "each": _Names(),
    "mixtral": _Names("block_sparse_moe", gate="w1", up="w3", down="w2"),
    "fused": _Names(),
    "gpt_oss": _Names(router="router"),
    "stacked": _Names(),
}


def expert_layer(spec: ModelSpec, moe: MoESpec, own: Shard, here: str, there: str) -> Iterator[Parameter]:
    """Yields every parameter of an MoE layer (router, experts, shared expert) on the rank with the shard `own`, in the order of
    use. `here` is the prefix of the parameters' names on the rank, `there` that of the tensors' names in the checkpoint
    (``model.layers.3``)."""
    at, hidden = f"{there}.{_NAMES[moe.form].block}", spec.hidden_size
    yield from _router(moe, hidden, f"{here}.mlp.router", f"{at}.{_NAMES[moe.form].router}")
    yield from _experts(moe, own, hidden, f"{here}.mlp.experts", f"{at}.experts")
    if moe.shared_size:
        yield from _shared(moe, own, hidden, f"{here}.mlp.shared", at)


def _router(moe: MoESpec, hidden: int, here: str, there: str) -> Iterator[Parameter]:
    """Yields the router's parameters, complete on every rank and in float32: rounding could select another expert."""
    everything = (f"{there}.weight", moe.num_experts, range(moe.num_experts))
    yield replace(rows(f"{here}.weight", hidden, everything), fp32=True)
    if moe.router_bias:
        yield replace(whole(f"{here}.bias", f"{there}.bias", moe.num_experts), fp32=True)
    if moe.choice_bias:
        yield replace(whole(f"{here}.choice_bias", f"{there}.e_score_correction_bias", moe.num_experts), fp32=True)


def _experts(moe: MoESpec, own: Shard, hidden: int, here: str, there: str) -> Iterator[Parameter]:
    columns, slots = len(own.expert_columns), len(own.experts)
    gate_up, down = _CUTS[moe.form](moe, own.expert_columns, hidden, there)
    yield _stacked(f"{here}.gate_up", (slots, 2 * columns, hidden), own, gate_up)
    if moe.expert_bias:
        yield _stacked(
            f"{here}.gate_up_bias",
            (slots, 2 * columns),
            own,
            _interleaved(f"{there}.gate_up_proj_bias", moe, own.expert_columns),
        )
    yield _stacked(f"{here}.down", (slots, hidden, columns), own, down)
    # The ranks' partial results of an expert are summed, so only the rank with its first columns adds the bias.
    if moe.expert_bias and own.expert_columns.start == 0:
        bias = WeightSlice(f"{there}.down_proj_bias", (moe.num_experts, hidden), 0, range(hidden), 0)
        yield _stacked(f"{here}.down_bias", (slots, hidden), own, lambda expert: (replace(bias, source_slot=expert),))


def _shared(moe: MoESpec, own: Shard, hidden: int, here: str, block: str) -> Iterator[Parameter]:
    there = f"{block}.shared_expert" if moe.shared_gate else f"{block}.shared_experts"
    take = (moe.shared_size, own.shared_columns)
    yield rows(f"{here}.gate_up", hidden, (f"{there}.gate_proj.weight", *take), (f"{there}.up_proj.weight", *take))
    yield inputs(f"{here}.down", f"{there}.down_proj.weight", hidden, *take)
    if moe.shared_gate:
        yield rows(f"{here}.gate", hidden, (f"{block}.shared_expert_gate.weight", 1, range(1)))


_Cut = Callable[[int], tuple[WeightSlice, ...]]
"""Function that returns the slices of one expert, not yet assigned to a slot."""


def _stacked(name: str, shape: tuple[int, ...], own: Shard, cut: _Cut) -> Parameter:
    """Returns a parameter with the slices of a rank's experts in consecutive slots."""
    return Parameter(
        name,
        shape,
        tuple(replace(weight_slice, slot=slot) for slot, expert in enumerate(own.experts) for weight_slice in cut(expert)),
    )


def _each(moe: MoESpec, columns: range, hidden: int, there: str) -> tuple[_Cut, _Cut]:
    names, size = _NAMES[moe.form], moe.expert_size

    def gate_up(expert: int) -> tuple[WeightSlice, ...]:
        return tuple(
            WeightSlice(f"{there}.{expert}.{name}.weight", (size, hidden), 0, columns, at * len(columns))
            for at, name in enumerate((names.gate, names.up))
        )

    def down(expert: int) -> tuple[WeightSlice, ...]:
        return (WeightSlice(f"{there}.{expert}.{names.down}.weight", (hidden, size), 1, columns, 0),)

    return gate_up, down


def _fused(moe: MoESpec, columns: range, hidden: int, there: str) -> tuple[_Cut, _Cut]:
    experts, size = moe.num_experts, moe.expert_size

    def gate_up(expert: int) -> tuple[WeightSlice, ...]:
        shape = (experts, 2 * size, hidden)
        return tuple(
            WeightSlice(f"{there}.gate_up_proj", shape, 0, range(half + columns.start, half + columns.stop), at, expert)
            for half, at in ((0, 0), (size, len(columns)))
        )

    def down(expert: int) -> tuple[WeightSlice, ...]:
        return (WeightSlice(f"{there}.down_proj", (experts, hidden, size), 1, columns, 0, expert),)

    return gate_up, down


def _gpt_oss(moe: MoESpec, columns: range, hidden: int, there: str) -> tuple[_Cut, _Cut]:
    interleaved = _interleaved(f"{there}.gate_up_proj", moe, columns, hidden)

    def down(expert: int) -> tuple[WeightSlice, ...]:
        return (
            WeightSlice(
                f"{there}.down_proj", (moe.num_experts, moe.expert_size, hidden), 0, columns, 0, expert, transposed=True
            ),
        )

    return interleaved, down


def _interleaved(source: str, moe: MoESpec, columns: range, *hidden: int) -> _Cut:
    """Returns the cut of a tensor with interleaved gate and up columns: ``gate 0, up 0, gate 1, up 1, ...``.

    The tensor is a bias if no `hidden` size is given.
    """
    shape = (moe.num_experts, *hidden, 2 * moe.expert_size)

    def cut(expert: int) -> tuple[WeightSlice, ...]:
        return tuple(
            WeightSlice(source, shape, len(hidden), range(2 * columns.start + odd, 2 * columns.stop, 2), odd * len(columns),
                  expert, transposed=bool(hidden))
            for odd in (0, 1)
        )  # fmt: skip

    return cut


def _in_stacks(moe: MoESpec, columns: range, hidden: int, there: str) -> tuple[_Cut, _Cut]:
    experts, size, names = moe.num_experts, moe.expert_size, _NAMES[moe.form]

    def gate_up(expert: int) -> tuple[WeightSlice, ...]:
        return tuple(
            WeightSlice(f"{there}.{name}.weight", (experts, size, hidden), 0, columns, at * len(columns), expert)
            for at, name in enumerate((names.gate, names.up))
        )

    def down(expert: int) -> tuple[WeightSlice, ...]:
        return (WeightSlice(f"{there}.{names.down}.weight", (experts, hidden, size), 1, columns, 0, expert),)

    return gate_up, down


_CUTS: dict[ExpertTensorFormat, Callable[[MoESpec, range, int, str], tuple[_Cut, _Cut]]] = {
    "each": _each,
    "mixtral": _each,
    "fused": _fused,
    "gpt_oss": _gpt_oss,
    "stacked": _in_stacks,
}
"""Functions, by checkpoint form, that return the cuts of gate and up and of down.

Their arguments are the MoE specification, the rank's own columns, the hidden size and the prefix in the checkpoint.
"""
