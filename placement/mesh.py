"""The rank grid: which rank sits where, and who talks to whom along each axis.

Rank order inside a replica, outermost axis first: ``pp, attn_dp, cp, tp``. With ``pp=2, tp=3``::

    world_rank   tp0 tp1 tp2
    stage 0        0   1   2      <- a tp group is a row: contiguous ranks, so it falls inside a node
    stage 1        3   4   5      <- a pp group is a column: 0-3, 1-4, 2-5

Inside a tp group, ``dcp`` consecutive ranks that hold the same KV head share its positions. With ``tp=4, dcp=2``::

    tp group     [0 1 2 3]
    dcp groups   [0 1] [2 3]
"""

from __future__ import annotations

from dataclasses import dataclass

from placement.layout import Layout

AXES = ("pp", "attn_dp", "cp", "tp")
"""Axes of the dense grid, outermost first."""

GROUP_AXES = (*AXES, "dcp")
"""Axes along which every rank has a group: whoever makes groups loops over these."""


@dataclass(frozen=True)
class Coords:
    """Where a rank sits in its replica's grid: one index per axis of `AXES`."""

    pp: int
    attn_dp: int
    cp: int
    tp: int


def sizes(layout: Layout) -> tuple[int, ...]:
    """Number of ranks along each axis of `AXES`."""
    return tuple(getattr(layout, axis) for axis in AXES)


def coords(layout: Layout, world_rank: int) -> Coords:
    """Coordinates of a world rank. Raises `IndexError` outside ``range(layout.world)``."""
    if not 0 <= world_rank < layout.world:
        raise IndexError(f"world rank {world_rank} is outside 0..{layout.world - 1} of layout {layout}")
    indices = []
    for size in reversed(sizes(layout)):
        world_rank, index = divmod(world_rank, size)
        indices.append(index)
    return Coords(*reversed(indices))


def world_rank(layout: Layout, at: Coords) -> int:
    """World rank at the given coordinates; the inverse of `coords`."""
    rank = 0
    for axis, size in zip(AXES, sizes(layout), strict=True):
        rank = rank * size + getattr(at, axis)
    return rank


def leader(layout: Layout) -> int:
    """World rank that sends the results: the first rank of the last stage.

    All its tp ranks sample the same tokens; its other cp ranks do not hold the last token of a split prompt.
    """
    return world_rank(layout, Coords(pp=layout.pp - 1, attn_dp=0, cp=0, tp=0))


def groups(layout: Layout, axis: str) -> list[list[int]]:
    """All groups of one axis of `GROUP_AXES`: lists of world ranks that differ in that axis only, in axis order.

    The groups of an axis partition the world. Every rank computes the same list. Raises `KeyError` for an unknown axis:
    treating it as one of size 1 would turn a misspelling into missing collectives.
    """
    if axis == "dcp":
        return [row[start : start + layout.dcp] for row in groups(layout, "tp") for start in range(0, layout.tp, layout.dcp)]
    if axis not in AXES:
        raise KeyError(f"there is no axis {axis!r}; the axes are {', '.join(GROUP_AXES)}")
    by_rest: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world):
        at = coords(layout, rank)
        rest = tuple(getattr(at, other) for other in AXES if other != axis)
        by_rest.setdefault(rest, []).append(rank)
    return list(by_rest.values())


def group_of(layout: Layout, axis: str, rank: int) -> list[int]:
    """The group of one axis that a world rank belongs to."""
    return next(group for group in groups(layout, axis) if rank in group)
