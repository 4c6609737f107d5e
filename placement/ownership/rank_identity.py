"""The identity of a rank within its replica: layout, world rank, coordinates and shard, as one value.

It is constructed once, when the rank is assembled, and passed on from there.
"""

from __future__ import annotations

from dataclasses import dataclass

from placement.layout.layout import Layout
from placement.layout.mesh import Coords, coords_of
from placement.model.spec import ModelSpec
from placement.ownership.context import ContextRank
from placement.ownership.handoff import Side
from placement.ownership.shard import Shard
from placement.ownership.shards import shard


@dataclass(frozen=True)
class RankIdentity:
    """A rank's coordinates in the grid and the values derived from them. `block_size` is the number of tokens per KV block."""

    layout: Layout
    world_rank: int
    block_size: int
    coords: Coords
    shard: Shard
    """The part of the model that the rank holds."""

    @classmethod
    def of(cls, spec: ModelSpec, layout: Layout, world_rank: int, block_size: int) -> RankIdentity:
        """Returns the identity of a world rank; `block_size` is the number of tokens of a KV block. The layout must have passed
        `placement.legality.check`. Raises `IndexError` if it has no such rank."""
        coords = coords_of(layout, world_rank)
        return cls(layout, world_rank, block_size, coords, shard(spec, layout, coords))

    @property
    def place(self) -> ContextRank:
        """Coordinates of the rank among the ranks that share a sequence (cp and dcp), and its DP rank."""
        return ContextRank.of(self.layout, self.coords, self.block_size)

    @property
    def side(self) -> Side:
        """The layout of the rank's replica, its block size and the rank's DP rank, which peers need for a KV transfer."""
        return Side(self.layout, self.block_size, self.coords.attn_dp)
