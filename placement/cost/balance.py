"""Load balance over the ranks of a replica, and the pipeline bubble (idle time of pipeline-parallel stages)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from placement.layout.layout import Layout
from placement.layout.mesh import coords_of
from placement.model.spec import ModelSpec
from placement.ownership.shard import Shard
from placement.ownership.shards import parameters, shard
from placement.ownership.weight_slices import Parameter

MEASURE = "weights a rank reads for each step of one token; an embedding that is only looked up is not read"


@dataclass(frozen=True)
class Balance:
    """Work of each world rank, in weight elements read per token, as `MEASURE` defines it.

    A step takes as long as its slowest rank, so `mean_over_max` is the fraction of the devices' time that is used. `for_shares`
    is the same ratio with each rank's work divided by its share of the tp group: 1 if work is exactly proportional to
    `tp_shares`, and equal to `mean_over_max` without shares. All stages are compared with each other, since they work
    concurrently if enough micro-batches are in flight (see `bubble`).
    """

    work: tuple[int, ...]
    mean_over_max: float
    for_shares: float


def balance(spec: ModelSpec, layout: Layout) -> Balance:
    """Returns the load balance over the ranks of one replica. The layout must have passed `placement.legality.check`."""
    all_coords = [coords_of(layout, rank) for rank in range(layout.world)]
    work = tuple(weights_read(spec, shard(spec, layout, coords)) for coords in all_coords)
    shares = layout.tp_shares or (1.0,) * layout.tp
    return Balance(
        work, _mean_over_max(work, [1.0] * layout.world), _mean_over_max(work, [shares[coords.tp] for coords in all_coords])
    )


def weights_read(spec: ModelSpec, own: Shard) -> int:
    """Returns the number of weight elements that the rank with the shard `own` reads for a step of one token.

    Padding rows count. Experts count by the expected number that the token is routed to, all experts being equally likely. An
    embedding that is only looked up does not count.
    """
    rows = {row.name: _read(spec, row) for row in parameters(spec, own)}
    looked_up = rows.pop("embed.weight", 0)
    is_head = own.last_stage and "head.weight" not in rows
    return sum(rows.values()) + (looked_up if is_head else 0)


def _read(spec: ModelSpec, row: Parameter) -> int:
    chosen = (spec.moe.top_k, spec.moe.num_experts) if spec.moe is not None and ".experts." in row.name else (1, 1)
    return prod(row.shape) * chosen[0] // chosen[1]


def bubble(stages: int, micro_batches: int) -> float:
    """Returns the fraction of time, 0 to 1, that each of `stages` pipeline stages idles with `micro_batches` micro-batches in
    flight: ``(P-1) / (M+P-1)`` (Huang et al. 2019, GPipe, section 2.3).

    With four stages and five micro-batches, a stage works in 5 of 8 time slots::

        stage 0   0 1 2 3 4 . . .
        stage 1   . 0 1 2 3 4 . .
        stage 2   . . 0 1 2 3 4 .
        stage 3   . . . 0 1 2 3 4
    """
    return (stages - 1) / (micro_batches + stages - 1)


def _mean_over_max(work: Sequence[int], speeds: Sequence[float]) -> float:
    """Returns the time of a perfect split divided by the time of this split, on ranks of the given speeds."""
    slowest = max(done / speed for done, speed in zip(work, speeds, strict=True))
    return sum(work) / sum(speeds) / slowest
