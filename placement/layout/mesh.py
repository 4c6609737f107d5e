"""The rank grid (device mesh; parallel_state in vLLM): coordinates of every rank, and the process groups along each axis.

Rank order inside a replica, outermost axis first: ``pp, attn_dp, cp, tp``. With ``pp=2, tp=3``::

    world_rank   tp0 tp1 tp2
    stage 0        0   1   2      <- a tp group is a row: contiguous ranks, so it falls inside a node
    stage 1        3   4   5      <- a pp group is a column: 0-3, 1-4, 2-5

Inside a tp group, ``dcp`` consecutive ranks that hold the same KV head split its positions between them. With ``tp=4, dcp=2``::

    tp group     [0 1 2 3]
    dcp groups   [0 1] [2 3]

The MoE layers arrange the ranks of a stage in another grid, ``moe_dp, ep, moe_tp``, independent of the DP rank and tp group
that a rank belongs to in attention. 16 ranks as ``attn_dp=4, tp=4`` with ``ep=16``::

                  tp0 tp1 tp2 tp3
    attn_dp 0       0   1   2   3     world_rank = dp_rank * 4 + tp_rank
    attn_dp 1       4   5   6   7     <- a DP rank attends to its own requests; its tp group, a row, splits their tokens before
    attn_dp 2       8   9  10  11        the experts (reduce-scatter) and gathers them after (all-gather)
    attn_dp 3      12  13  14  15
                    one ep group of all 16 (all-to-all): rank r holds 1/16 of the experts

The same 16 ranks with ``moe_dp=2, ep=4`` (so ``moe_tp=2``)::

    moe_dp 0      [0 1] [2 3] [4 5] [6 7]          <- moe_tp groups: two halves of the same experts
    moe_dp 1      [8 9] [10 11] [12 13] [14 15]
    ep groups     [0 2 4 6] [1 3 5 7] [8 10 12 14] [9 11 13 15]
    moe_dp groups [0 8] [1 9] ... [7 15]           <- the same experts in two copies
    moe groups    [0 1 2 3 4 5 6 7] [8 ... 15]     <- the ranks of one copy (ep x moe_tp), between which tokens are dispatched
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from placement.layout.layout import Layout
from placement.layout.lm_head import is_over_stage
from placement.model.spec import ModelSpec

AXES = ("pp", "attn_dp", "cp", "tp")
"""Axes of the dense grid, outermost first."""

MOE_AXES = ("pp", "moe_dp", "ep", "moe_tp")
"""Axes of the grid that the MoE layers see, outermost first."""

HEAD_AXIS = "head"
"""Axis that joins the tp groups of all DP ranks, used if the LM head is split over them (`placement.layout.lm_head`)."""

GROUP_AXES = (*AXES, "dcp")
"""Axes that have groups for every model."""

MOE_GROUP_AXES = (*MOE_AXES[1:], "moe")
"""Additional axes that have groups for MoE models."""


@dataclass(frozen=True)
class Coords:
    """Coordinates of a rank in its replica's grid: one index per axis of `AXES`."""

    pp: int
    attn_dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class MoECoords:
    """Coordinates of a rank in the grid of the MoE layers: one index per axis of `MOE_AXES`."""

    pp: int
    moe_dp: int
    ep: int
    moe_tp: int


def sizes(layout: Layout, axes: Sequence[str] = AXES) -> tuple[int, ...]:
    """Returns the number of ranks along each of the axes, which are names of size fields of `Layout`."""
    return tuple(getattr(layout, axis) for axis in axes)


def coords_of(layout: Layout, world_rank: int) -> Coords:
    """Returns the coordinates of a world rank (its number within the replica) in the dense grid. Raises `IndexError` outside
    ``range(layout.world)``."""
    return Coords(*_indices(layout, AXES, world_rank))


def world_rank(layout: Layout, coords: Coords) -> int:
    """Returns the world rank at the given coordinates, which are not checked; the inverse of `coords_of`."""
    return _number(layout, AXES, coords)


def moe_coords_of(layout: Layout, world_rank: int) -> MoECoords:
    """Returns a world rank's coordinates in the grid of the MoE layers. Raises `IndexError` outside ``range(layout.world)``.

    The layout must have passed `placement.legality.check`, so that both grids have the same number of ranks.
    """
    return MoECoords(*_indices(layout, MOE_AXES, world_rank))


def moe_world_rank(layout: Layout, coords: MoECoords) -> int:
    """Returns the world rank at the given MoE coordinates, which are not checked; the inverse of `moe_coords_of`."""
    return _number(layout, MOE_AXES, coords)


def _indices(layout: Layout, axes: Sequence[str], world_rank: int) -> list[int]:
    if not 0 <= world_rank < layout.world:
        raise IndexError(f"world rank {world_rank} is outside 0..{layout.world - 1} of layout {layout}")
    indices = []
    for size in reversed(sizes(layout, axes)):
        world_rank, index = divmod(world_rank, size)
        indices.append(index)
    return indices[::-1]


def _number(layout: Layout, axes: Sequence[str], coords: Coords | MoECoords) -> int:
    rank = 0
    for axis, size in zip(axes, sizes(layout, axes), strict=True):
        rank = rank * size + getattr(coords, axis)
    return rank


def output_ranks(layout: Layout) -> list[int]:
    """Returns the output rank of each DP rank: the world rank that sends its results, the first of its last stage.

    All tp ranks of a DP rank sample the same tokens; its other cp ranks do not hold the last token of a split prompt.
    """
    return [world_rank(layout, Coords(pp=layout.pp - 1, attn_dp=dp_rank, cp=0, tp=0)) for dp_rank in range(layout.attn_dp)]


def dp_rank_members(layout: Layout, dp_rank: int) -> frozenset[int]:
    """Returns the world ranks that belong to the DP rank (attn_dp) `dp_rank`, in all stages; an empty set if there is no such
    DP rank."""
    return frozenset(rank for rank in range(layout.world) if coords_of(layout, rank).attn_dp == dp_rank)


def groups(layout: Layout, axis: str) -> list[list[int]]:
    """Returns all groups of one axis of `GROUP_AXES`, `MOE_GROUP_AXES` or `HEAD_AXIS`, as lists of world ranks.

    The ranks of a group differ only in their coordinate along that axis (for `HEAD_AXIS`: in DP rank and tp rank). They are in
    axis order, and the groups partition the world. Every rank computes the same list. Raises `KeyError` for an unknown axis:
    treating it as an axis of size 1 would turn a misspelling into missing collectives.
    """
    if axis not in _GROUPS:
        raise KeyError(f"there is no axis {axis!r}; the axes are {', '.join((*GROUP_AXES, *MOE_GROUP_AXES, HEAD_AXIS))}")
    return _GROUPS[axis](layout)


def _along(grid: Sequence[str], *axes: str) -> Callable[[Layout], list[list[int]]]:
    """Returns a function that lists the groups of ranks whose coordinates in a grid differ in `axes` only."""

    def groups_of(layout: Layout) -> list[list[int]]:
        by_rest: dict[tuple[int, ...], list[int]] = {}
        for rank in range(layout.world):
            indices = zip(grid, _indices(layout, grid, rank), strict=True)
            rest = tuple(index for axis, index in indices if axis not in axes)
            by_rest.setdefault(rest, []).append(rank)
        return list(by_rest.values())

    return groups_of


def _dcp_groups(layout: Layout) -> list[list[int]]:
    """Returns the runs of `dcp` consecutive ranks within each tp group."""
    tp_groups = _along(AXES, "tp")(layout)
    return [group[start : start + layout.dcp] for group in tp_groups for start in range(0, layout.tp, layout.dcp)]


_GROUPS: Mapping[str, Callable[[Layout], list[list[int]]]] = {
    **{axis: _along(AXES, axis) for axis in AXES},
    "dcp": _dcp_groups,
    **{axis: _along(MOE_AXES, axis) for axis in MOE_AXES[1:]},
    "moe": _along(MOE_AXES, "ep", "moe_tp"),
    HEAD_AXIS: _along(AXES, "attn_dp", "tp"),
}
"""Function that lists the groups of each axis."""


def talking_axes(spec: ModelSpec, layout: Layout | None = None) -> tuple[str, ...]:
    """Returns the axes along which the ranks of a model communicate: `GROUP_AXES`, ``moe`` for an MoE model, and `HEAD_AXIS` if
    `layout` is given and splits the LM head over all DP ranks."""
    axes = GROUP_AXES if spec.moe is None else (*GROUP_AXES, "moe")
    return (*axes, HEAD_AXIS) if layout is not None and is_over_stage(spec, layout) else axes


def group_of(layout: Layout, axis: str, rank: int) -> list[int]:
    """Returns the group of one axis that a world rank belongs to, as world ranks in axis order. Raises `KeyError` for an
    unknown axis, and `StopIteration` if the layout has no such rank."""
    return next(group for group in groups(layout, axis) if rank in group)
