"""How even a packing of experts can be at most: a load that the most loaded rank cannot get below.

Given: the load of each expert, and the slots of each rank (`s` at least). Any number of copies of any expert may be chosen,
as long as the slots are filled and no rank holds an expert twice; copies share a load evenly. Suppose all ranks stay within
`T`. Then

* `T` is at least the mean over the ranks;
* no copy is heavier than `T` less what its rank's other slots hold at least: each expert has at least so many copies;
* of copies heavier than ``(T - what s-k-1 other slots hold at least) / (k+1)`` no rank has more than `k` (k+1 of them and the
  rest would be more than `T`), so ``k * ranks`` is the most there can be, for each k from 1 to s-1. An expert leaves their
  number when it gets more copies, but there are only so many to give out (counted generously: parts of experts may leave).

The least `T` against which nothing of this speaks is found by halving; what is returned is one that something speaks against.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_HALVINGS = 40
_MOST_TOGETHER = 12
"""Sizes `k` that are looked at."""


def least_load(load: NDArray[np.float64], slots: Sequence[int]) -> float:
    """A load that the most loaded rank has at least, whatever the packing."""
    low, high = float(load.sum()) / len(slots), float(load.sum())
    if not high or not _speaks_against(low, load, slots):
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _speaks_against(middle, load, slots) else (low, middle)
    return low


def _speaks_against(limit: float, load: NDArray[np.float64], slots: Sequence[int]) -> bool:
    """Whether no packing can keep every rank within `limit`."""
    ranks, room = len(slots), min(slots)
    spare = sum(slots) - len(load)
    copies = np.ones(len(load))
    beside = _least_beside(load, copies + spare, ranks, room)
    for _ in range(2):  # the second time knowing how many copies the heavy ones take
        heaviest = limit - beside[room - 1]
        if heaviest <= 0:
            return True
        copies = _copies_below(load, heaviest)
        spare = sum(slots) - int(copies.sum())
        if spare < 0 or copies.max() > ranks:
            return True
        beside = _least_beside(load, copies + spare, ranks, room)
    return any(
        _least_heavier((limit - beside[room - together - 1]) / (together + 1), load, copies, spare, ranks) > together * ranks
        for together in range(1, min(room, _MOST_TOGETHER + 1))
    )


def _copies_below(load: NDArray[np.float64], most: float) -> NDArray[np.float64]:
    """Copies of each expert that make none heavier than `most`; a little more is put down to rounding."""
    return np.maximum(1, np.ceil(load / most * (1 - 1e-12)))


def _least_beside(load: NDArray[np.float64], most_copies: NDArray[np.float64], ranks: int, room: int) -> NDArray[np.float64]:
    """What 0, 1, 2 ... slots hold at least: the lightest copies there can be, of different experts."""
    lightest = np.sort(load / np.minimum(most_copies, ranks))[:room]
    return np.concatenate([[0.0], np.cumsum(lightest)])


def _least_heavier(weight: float, load: NDArray[np.float64], copies: NDArray[np.float64], spare: int, ranks: int) -> float:
    """How many copies are heavier than `weight` at least, when `spare` more than `copies` can be made."""
    if weight <= 0:
        return 0.0
    needed = _copies_below(load, weight)
    heavier = needed > copies
    gone, cost = copies[heavier], needed[heavier] - copies[heavier]
    possible = needed[heavier] <= ranks
    order = np.argsort(-gone[possible] / cost[possible], kind="stable")
    gone_first, cost_first = gone[possible][order], cost[possible][order]
    before = np.concatenate([[0.0], np.cumsum(cost_first)[:-1]]) if len(order) else np.zeros(0)
    parts = np.clip((spare - before) / cost_first, 0, 1)
    return float(gone.sum() - (parts * gone_first).sum())
