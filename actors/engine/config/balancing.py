"""The settings of the expert-parallel load balancer (EPLB) of a replica (`actors.engine.eplb`)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from placement.experts.expert_map import ExpertMap, map_of
from placement.experts.rebalancer import Rebalancer
from placement.layout import mesh
from placement.layout.layout import Layout
from placement.model.spec import ModelSpec

USUAL_INTERVAL = 3000
"""Default number of steps between two rebalancing decisions."""


class Balancing(BaseModel):
    """The settings with which the experts of a replica are balanced while it serves.

    `experts` is the initial expert map, the same in each of `layers`. `expert_bytes`: bytes of one expert's weights in one
    layer on a rank. `bytes_per_s`: send rate of a rank that is assumed until one is measured. `interval`: steps between two
    rebalancing decisions (0 disables them). `skew`: balancedness below which a decision is made at once (None disables this).
    With both disabled, loads are counted but no expert is moved.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: tuple[int, ...]
    experts: ExpertMap
    ranks: int
    """Number of ranks that report: all ranks of the replica."""
    counting: tuple[int, ...]
    """World ranks whose tokens are counted: one of the ranks between which each expert's columns are split (moe_tp rank 0)."""
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
        """Return the settings for a model under a layout, or None if it has no MoE layers or ``ep`` is 1.

        `element_bytes` is the size of one weight. `rebalance_every` sets `interval` (None: the default, 3000 steps), and
        `rebalance_skew` sets `skew`.
        """
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
        """Number of steps for which an expert map is assumed to be used when the cost of a move is weighed: `interval`, or 3000
        if that is 0."""
        return self.interval or USUAL_INTERVAL

    @property
    def policy(self) -> Rebalancer:
        """The rebalancing policy with these settings."""
        return Rebalancer(self.interval, self.skew, self.hysteresis, self.must_pay)
