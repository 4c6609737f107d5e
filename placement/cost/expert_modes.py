"""How tokens meet the experts in a step: the modes, and which one sends least.

With `n` ranks in a MoE copy, `t` tokens contributed by each, rows of `b` bytes, and `u` other ranks a token has business with
(`placement.cost.expert_dispatch`), a rank sends in each layer

    sum      2 (n-1) t b                         all tokens are on every rank: partial results are added up over the tp group
    gather   2 (n-1) t b + join                  own tokens to all ranks, partial results added up where they came from
    a2a      2 u t b + u t 8 top_k + join        own tokens to the ranks of their experts, weights and ids beside them, and back

where ``join`` is (tp-1) t b, each rank's results to its tp group. So ``a2a`` sends less as soon as experts are on many ranks,
but it has calls that the others have not, and the host waits for numbers that only the router knows. It is chosen where
what it saves is more than `CALLS_BYTES`; ``sum`` needs a copy that is a tp group, and no token on several of these.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from placement.cost.expert_dispatch import chances_with_copies, destination_chances
from placement.experts.expert_map import map_of
from placement.layout.layout import Layout
from placement.model.spec import ModelSpec
from placement.ownership import expert_tokens
from placement.ownership.expert_tokens import NewLensAcrossDP

Mode = Literal["sum", "gather", "a2a"]

CALLS_BYTES = 256 * 1024
"""Bytes that take about as long as the calls and the wait that ``a2a`` has more."""


def mode(spec: ModelSpec, layout: Layout, new_lens_across_dp: NewLensAcrossDP, element_bytes: int) -> Mode:
    """The mode of a step whose rows have so many new tokens on each DP rank. Every rank finds the same in the plan."""
    adds_up = layout.ep * layout.moe_tp == layout.tp and not any(
        expert_tokens.num_common(lens, layout.cp) for lens in new_lens_across_dp
    )
    if layout.dispatch == "a2a" or (
        layout.dispatch == "auto" and _saved(spec, layout, new_lens_across_dp, element_bytes, adds_up)
    ):
        return "a2a"
    return "sum" if adds_up else "gather"


@lru_cache(maxsize=64)
def chances(spec: ModelSpec, layout: Layout) -> list[float]:
    """Of each ep rank, how likely a token has an expert there."""
    assert spec.moe is not None
    placed = map_of(spec.moe, layout)
    if layout.redundant_experts:
        return chances_with_copies(placed, 0, spec.moe.top_k)
    return destination_chances(spec.moe.num_experts, spec.moe.top_k, placed.slots)


def extra_bytes(spec: ModelSpec) -> int:
    """What goes beside a token's row in ``a2a``: of each of its experts the weight (fp32) and the id (int32)."""
    assert spec.moe is not None
    return 8 * spec.moe.top_k


def _saved(spec: ModelSpec, layout: Layout, new_lens_across_dp: NewLensAcrossDP, element_bytes: int, adds_up: bool) -> bool:
    """Whether ``a2a`` saves enough, in the mean over the ranks."""
    others = layout.ep * layout.moe_tp - 1
    found = chances(spec, layout)
    reached = layout.moe_tp * sum(found) - sum(found) / len(found)
    tokens = sum(map(sum, new_lens_across_dp)) / layout.stage_ranks
    row = spec.hidden_size * element_bytes
    join = (layout.tp - 1) * row if adds_up else 0
    return tokens * (2 * (others - reached) * row - reached * extra_bytes(spec) - join) > CALLS_BYTES
