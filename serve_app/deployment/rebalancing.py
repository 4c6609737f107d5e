"""What `serve` is asked of the live expert balancer, judged before anything starts: it needs experts on several `ep` ranks."""

from __future__ import annotations

from collections.abc import Iterator

from placement.layout.layout import Layout
from placement.legality.check import check
from placement.model.spec import ModelSpec
from placement.nodes.hardware import ClusterSpec


def refusal(every: int | None, skew: float | None, spec: ModelSpec, layout: Layout, cluster: ClusterSpec | None) -> str | None:
    """Why experts cannot be balanced as asked, and what would work; None where they can, or nothing is asked.

    `every`: steps between looks, of which 0 asks for nothing; `skew`: balancedness that calls for one.
    """
    asked = [f"rebalance_every={every}"] if every else []
    asked += [f"rebalance_skew={skew}"] if skew is not None else []
    if not asked or (spec.moe is not None and layout.ep > 1):
        return None
    why = "the model has none" if spec.moe is None else f"with ep=1 in layout {layout} they have nowhere to go"
    found = next(_with_ep(spec, layout, cluster), None)
    works = [f"layout {found}"] if found else []
    works.append("to leave it out" if len(asked) == 1 else "to leave both out")
    return f"{' and '.join(asked)} would move experts between ep ranks, but {why}. Try {' or '.join(works)}."


def _with_ep(spec: ModelSpec, layout: Layout, cluster: ClusterSpec | None) -> Iterator[Layout]:
    """Legal layouts with several ep ranks, most of them first: of the same ranks, then of twice as many."""
    if spec.moe is None:
        return
    kept = {name: value for name, value in layout.asked.items() if name != "moe_tp"}
    for more in ({}, {"attn_dp": 2 * layout.attn_dp}, {"tp": 2 * layout.tp}):
        ranks = Layout(**kept | more).stage_ranks
        for ep in filter(lambda size: ranks % size == 0, range(ranks, 1, -1)):
            found = Layout(**kept | more | {"ep": ep})
            if not check(found, spec, cluster):
                yield found
