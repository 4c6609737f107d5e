"""Expert dispatch modes (sum, gather, all-to-all): how tokens reach their experts in a step, and which mode sends least.

With `n` ranks in a MoE copy, `t` tokens contributed by each, rows of `b` bytes, and `u` other ranks that a token is sent to
(`placement.cost.expert_dispatch`), a rank sends in each layer::

    sum      2 (n-1) t b                         all tokens are on every rank: all-reduce of partial results over the tp group
    gather   2 (n-1) t b + join                  all-gather of own tokens, reduce-scatter of partial results
    a2a      2 u t b + u t 8 top_k + join        all-to-all of own tokens, weights and ids to their experts' ranks, and back

where ``join`` is (tp-1) t b, the all-gather of results over the tp group. ``a2a`` sends less once experts are spread over many
ranks, but it makes additional calls, and the host waits for row counts that only the router knows. It is chosen if it saves
more than `CALLS_BYTES`. ``sum`` requires that a MoE copy is one tp group and that no token is on several tp groups.
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
"""Number of bytes that take about as long to send as the additional calls and the wait of ``a2a``."""


def mode(spec: ModelSpec, layout: Layout, new_lens_across_dp: NewLensAcrossDP, element_bytes: int) -> Mode:
    """Returns how tokens reach their experts in a step: ``sum`` (all-reduce of partial results), ``gather`` (all-gather,
    reduce-scatter) or ``a2a`` (all-to-all).

    `new_lens_across_dp` has the number of new tokens of each row, per DP rank; `element_bytes` is the size of an element of a
    hidden state. ``layout.dispatch`` may force ``a2a`` or exclude it. The mode depends on the step plan alone, so all ranks
    agree. `spec` must be an MoE model.
    """
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
    """Returns, for each ep rank, the probability that it holds at least one expert of a token, if all experts are equally
    likely. The results are cached. Raises `AssertionError` if the model has no experts."""
    assert spec.moe is not None
    placed = map_of(spec.moe, layout)
    if layout.redundant_experts:
        return chances_with_copies(placed, 0, spec.moe.top_k)
    return destination_chances(spec.moe.num_experts, spec.moe.top_k, placed.slots)


def extra_bytes(spec: ModelSpec) -> int:
    """Returns the bytes sent with a token's row in ``a2a``: the weight (fp32) and the id (int32) of each of its `top_k`
    experts. Raises `AssertionError` if the model has no experts."""
    assert spec.moe is not None
    return 8 * spec.moe.top_k


def _saved(spec: ModelSpec, layout: Layout, new_lens_across_dp: NewLensAcrossDP, element_bytes: int, adds_up: bool) -> bool:
    """Whether ``a2a`` saves more than `CALLS_BYTES`, averaged over the ranks."""
    others = layout.ep * layout.moe_tp - 1
    found = chances(spec, layout)
    reached = layout.moe_tp * sum(found) - sum(found) / len(found)
    tokens = sum(map(sum, new_lens_across_dp)) / layout.stage_ranks
    row = spec.hidden_size * element_bytes
    join = (layout.tp - 1) * row if adds_up else 0
    return tokens * (2 * (others - reached) * row - reached * extra_bytes(spec) - join) > CALLS_BYTES
