"""What one rank is within its replica, as one value: it is made once, where the rank is put together, and passed from there."""

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
    """A rank's place in the grid, and what follows from it. `block_size`: tokens of one KV block."""

    layout: Layout
    world_rank: int
    block_size: int
    coords: Coords
    shard: Shard
    """The part of the model that it holds."""

    @classmethod
    def of(cls, spec: ModelSpec, layout: Layout, world_rank: int, block_size: int) -> RankIdentity:
        """Raises `IndexError` for a rank that the layout does not have."""
        coords = coords_of(layout, world_rank)
        return cls(layout, world_rank, block_size, coords, shard(spec, layout, coords))

    @property
    def place(self) -> ContextRank:
        """Its place among the ranks that share a sequence."""
        return ContextRank.of(self.layout, self.coords, self.block_size)

    @property
    def side(self) -> Side:
        """What peers in a KV transfer must know of its replica."""
        return Side(self.layout, self.block_size, self.coords.attn_dp)
