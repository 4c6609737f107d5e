"""Messages of expert parallelism (EP) and its load balancer (EPLB): load reports of ranks, and expert moves between slots."""

from __future__ import annotations

from actors.wire.message import Message


class ExpertMove(Message):
    """Reassigns the experts of one layer to physical slots (`placement.experts.expert_map`). Every rank applies the move before
    it runs the rows of the same plan.

    `experts`: the expert in each slot after the move. `transfers`: (source slot, target slot) of each expert that is copied;
    the source slots refer to the assignment before the move.
    """

    layer: int
    experts: list[int]
    transfers: list[tuple[int, int]]


class LayerReport(Message):
    """The load of one layer's experts on one rank.

    `tokens`: tokens by expert. `expert_s`: seconds of expert computation. `combine_s`: seconds of the combine step, the wait
    for slower ranks included.
    """

    layer: int
    tokens: list[int]
    expert_s: float
    combine_s: float


class ExpertReport(Message):
    """The expert load of one rank over the `steps` steps since its previous report, the last of which is `step`.

    Byte counts cover what this rank sent to other ranks.
    """

    world_rank: int
    step: int
    steps: int
    layers: list[LayerReport]
    sent_bytes: int
    """Bytes sent for dispatching tokens to experts and combining their outputs."""
    moved_bytes: int
    """Bytes of expert weights sent to other ranks."""
    move_s: float
    """Seconds spent on moving expert weights."""
