"""Checks the options of live expert rebalancing (EPLB) before anything starts: it needs experts on several `ep` ranks."""

from __future__ import annotations

from collections.abc import Iterator

from placement.layout.layout import Layout
from placement.legality.check import check
from placement.model.spec import ModelSpec
from placement.nodes.hardware import ClusterSpec


def refusal(every: int | None, skew: float | None, spec: ModelSpec, layout: Layout, cluster: ClusterSpec | None) -> str | None:
    """Returns why experts cannot be rebalanced between EP ranks as requested, with alternatives, as text; None if they can, or
    if nothing is requested.

    `every`: number of steps between checks, 0 or None for none requested; `skew`: the balancedness (mean load / largest load)
    below which a check is made at once, None for none requested. `cluster`: nodes on which an alternative layout must fit, if
    known.
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
    """Yields legal layouts with several ep ranks, the largest ep first: with the same number of ranks, then with twice as
    many."""
    if spec.moe is None:
        return
    kept = {name: value for name, value in layout.asked.items() if name != "moe_tp"}
    for more in ({}, {"attn_dp": 2 * layout.attn_dp}, {"tp": 2 * layout.tp}):
        ranks = Layout(**kept | more).stage_ranks
        for ep in filter(lambda size: ranks % size == 0, range(ranks, 1, -1)):
            found = Layout(**kept | more | {"ep": ep})
            if not check(found, spec, cluster):
                yield found
