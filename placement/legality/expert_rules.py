"""Legality rules of expert parallelism: the fields `ep`, `moe_tp`, `moe_dp` and `redundant_experts`.

For an MoE model, any `moe_dp`, `ep` and `moe_tp` whose product is the number of ranks of a stage are legal, with any `attn_dp`,
`cp` and `tp`. The number of experts need not be divisible by `ep`, nor the columns by `moe_tp`. Dense layers, and dense models,
may run on `attn_dp` DP ranks, each of which holds them completely.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import isqrt
from typing import Any

from placement.layout.layout import Layout
from placement.model.moe_spec import MoESpec
from placement.model.spec import ModelSpec


def experts_are_there(layout: Layout, spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Checks that expert fields are set only for models with experts, since they would have no effect otherwise; yields the
    field at fault and a sentence for each that is."""
    if spec.moe is None:
        for name in ("ep", "moe_dp", "redundant_experts", "dispatch"):
            if name in layout.asked:
                yield (
                    name,
                    f"{name}={getattr(layout, name)} says where experts are, or how tokens get there, but the model has none",
                )


def moe_axes_fill_a_stage(layout: Layout, spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Checks that the MoE layers use all ranks of a stage, ``moe_dp * ep * moe_tp == stage_ranks``; yields the field at fault
    and a sentence if they do not."""
    explicit = "moe_tp" in layout.asked
    if layout.moe_dp * layout.ep * layout.moe_tp == layout.stage_ranks or (spec.moe is None and not explicit):
        return
    ranks = f"the {layout.stage_ranks} ranks of a stage (attn_dp={layout.attn_dp} x cp={layout.cp} x tp={layout.tp})"
    given = f"moe_dp={layout.moe_dp} x ep={layout.ep}"
    if explicit:
        yield "moe_tp", f"{given} x moe_tp={layout.moe_tp} is {layout.moe_dp * layout.ep * layout.moe_tp} ranks, not {ranks}"
    else:
        yield "ep" if layout.ep > 1 else "moe_dp", f"{given} does not divide {ranks}"


def an_expert_column_per_rank(layout: Layout, spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Checks that every moe_tp rank holds at least one column of each of its experts; yields the field at fault and a sentence
    if not."""
    if spec.moe is not None and layout.moe_tp > spec.moe.expert_size:
        columns = f"the {spec.moe.expert_size} columns (moe_intermediate_size) of an expert"
        # A moe_tp that was not given follows from ep, so ep is the field to change.
        field = "moe_tp" if "moe_tp" in layout.asked else "ep"
        yield field, f"moe_tp={layout.moe_tp} is more than {columns}; more ep makes it less"


def an_expert_per_ep_rank(layout: Layout, spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Checks that every ep rank holds at least one expert; yields the field at fault and a sentence if not."""
    if spec.moe is not None and layout.ep > spec.moe.num_experts + layout.redundant_experts:
        copies = f" and {layout.redundant_experts} redundant ones" if layout.redundant_experts else ""
        yield "ep", f"ep={layout.ep} is more than the {spec.moe.num_experts} experts{copies} of the model"


def copies_go_to_other_ranks(layout: Layout, spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Checks that redundant experts fit on other ep ranks, since a second copy on the same rank is useless; yields the field at
    fault and a sentence if they do not."""
    asked = layout.redundant_experts
    if spec.moe is None or not asked:
        return
    if layout.ep == 1:
        yield "redundant_experts", f"redundant_experts={asked} are copies on other ep ranks, but ep=1"
    elif asked > most_redundant(spec, layout.ep):
        experts = spec.moe.num_experts
        yield (
            "redundant_experts",
            f"redundant_experts={asked} is more than {most_redundant(spec, layout.ep)}: "
            f"with ep={layout.ep} that many put each of the {experts} experts on every rank",
        )


def most_redundant(spec: ModelSpec, ep: int) -> int:
    """Returns the maximum number of redundant experts on `ep` ranks, with every expert on every rank; 0 for a dense model."""
    return spec.moe.num_experts * (ep - 1) if spec.moe is not None else 0


EXPERT_RULES = (
    experts_are_there,
    moe_axes_fill_a_stage,
    an_expert_column_per_rank,
    an_expert_per_ep_rank,
    copies_go_to_other_ranks,
)


def nearest_expert_axes(asked: Layout, spec: ModelSpec, stage_ranks: int) -> dict[str, Any]:
    """Returns the legal expert fields nearest to those of `asked`, for a stage of `stage_ranks` ranks, as keyword arguments of
    `Layout` without `moe_tp`; `dispatch` is kept. Empty for a dense model; without `ep` if no size of it is legal."""
    if spec.moe is None:
        return {}
    by_hand = "moe_tp" in asked.asked
    sizes = [size for size in _divisors(stage_ranks) if size <= asked.moe_dp]

    def kept(moe_dp: int, ep: int) -> int:
        """How many of the requested axes, and redundant experts, are left."""
        pairs = ((asked.moe_dp, moe_dp), (asked.ep, ep), (asked.moe_tp if by_hand else 1, stage_ranks // (moe_dp * ep)))
        return sum(min(pair) > 1 for pair in pairs) + (asked.redundant_experts > 0 and ep > 1)

    def wanted(moe_dp: int) -> int:
        return max(1, stage_ranks // moe_dp // asked.moe_tp) if by_hand and asked.ep == 1 else asked.ep

    legal = [(moe_dp, ep) for moe_dp in sizes for ep in _legal_ep(asked, spec.moe, stage_ranks // moe_dp)]
    if not legal:
        return {"moe_dp": sizes[-1], "dispatch": asked.dispatch}
    moe_dp, ep = min(legal, key=lambda pair: (-kept(*pair), -pair[0], abs(pair[1] - wanted(pair[0])), pair[1]))
    redundant = min(asked.redundant_experts, most_redundant(spec, ep))
    return {"moe_dp": moe_dp, "ep": ep, "redundant_experts": redundant, "dispatch": asked.dispatch}


def _legal_ep(asked: Layout, moe: MoESpec, ranks: int) -> list[int]:
    """Returns the sizes of ep with which `ranks` ranks can share one copy of the experts."""
    return [
        size
        for size in _divisors(ranks)
        if size <= moe.num_experts + min(asked.redundant_experts, moe.num_experts * (size - 1))
        and ranks // size <= moe.expert_size
    ]


@lru_cache(maxsize=256)
def _divisors(number: int) -> tuple[int, ...]:
    low = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*low, *(number // size for size in low)}))
