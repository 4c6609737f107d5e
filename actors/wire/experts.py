"""Messages about experts: what they did on a rank, and where they move."""

from __future__ import annotations

from actors.wire.message import Message


class ExpertMove(Message):
    """The experts of one layer go to other slots (`placement.experts.expert_map`), on every rank before the rows of the same
    plan.

    `experts`: the one in every slot from then on; `transfers`: (slot it comes from, slot it goes to), as the slots were before.
    """

    layer: int
    experts: list[int]
    transfers: list[tuple[int, int]]


class LayerReport(Message):
    """What the experts of one layer did on one rank: tokens by expert, seconds of their maths and of the combine, which
    include those of waiting for slower ranks."""

    layer: int
    tokens: list[int]
    expert_s: float
    combine_s: float


class ExpertReport(Message):
    """What a rank's experts did in the `steps` steps since its last report, up to `step`; bytes are those it sent to others."""

    world_rank: int
    step: int
    steps: int
    layers: list[LayerReport]
    sent_bytes: int
    """Of tokens on their way to experts and back."""
    moved_bytes: int
    """Of experts that went to other ranks."""
    move_s: float
