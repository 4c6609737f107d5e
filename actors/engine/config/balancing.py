"""How the experts of a replica are balanced while it serves (`actors.engine.balancing`)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from placement.experts.expert_map import ExpertMap, map_of
from placement.experts.rebalancer import Rebalancer
from placement.layout import mesh
from placement.layout.layout import Layout
from placement.model.spec import ModelSpec

USUAL_INTERVAL = 3000
"""Steps between looks unless asked otherwise."""


class Balancing(BaseModel):
    """How the experts of a replica are balanced while it serves. `experts`: their map at first, the same in each of `layers`.

    `expert_bytes`: weights of one expert of one layer on a rank; `bytes_per_s`: what a rank is taken to send until it has.
    `interval`: steps between looks (0: none by time); `skew`: balancedness below which to look at once (None: never). With
    neither, experts are counted and stay where they are.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: tuple[int, ...]
    experts: ExpertMap
    ranks: int
    """Ranks that report: all of the replica."""
    counting: tuple[int, ...]
    """World ranks whose tokens count: of the ranks that share each expert's columns, one."""
    expert_bytes: int
    groups: int = 1
    interval: int = USUAL_INTERVAL
    skew: float | None = None
    hysteresis: float = 0.05
    must_pay: bool = True
    ask_every: int = 64
    bytes_per_s: float = 1e9

    @classmethod
    def of(
        cls, spec: ModelSpec, layout: Layout, element_bytes: int, rebalance_every: int | None, rebalance_skew: float | None
    ) -> Balancing | None:
        """That of a model under a layout; None where there is nothing to balance. `rebalance_every`: see `interval`."""
        if spec.moe is None or layout.ep == 1:
            return None
        interval = USUAL_INTERVAL if rebalance_every is None else rebalance_every
        ranks = range(layout.world)
        columns = -(-spec.moe.expert_size // layout.moe_tp)
        return cls(
            layers=spec.moe.layers,
            experts=map_of(spec.moe, layout),
            ranks=layout.world,
            counting=tuple(rank for rank in ranks if mesh.moe_coords_of(layout, rank).moe_tp == 0),
            expert_bytes=3 * columns * spec.hidden_size * element_bytes,
            groups=spec.moe.groups,
            interval=interval,
            skew=rebalance_skew,
            ask_every=min(64, interval or 64),
        )

    @property
    def horizon(self) -> int:
        """Steps that a map is taken to serve."""
        return self.interval or USUAL_INTERVAL

    @property
    def policy(self) -> Rebalancer:
        """The policy these numbers are for."""
        return Rebalancer(self.interval, self.skew, self.hysteresis, self.must_pay)
