"""The replica options that a user may set: those of its engine, of its KV tiers, and of its ranks."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from actors.engine.config.options import EngineOptions
from actors.wire.tier_config import TierOptions
from placement.cost.units import ByteCount
from placement.model.bounds import PositiveInt


class ReplicaOptions(EngineOptions, TierOptions):
    """The options that all replicas of a deployment share. `ServeArgs` and `ReplicaSettings` both inherit them."""

    model_config = ConfigDict(title="Ranks of a replica")

    kv_bytes: Annotated[ByteCount, Field(ge=1)] | None = None
    """KV cache of one rank, for example 2GiB; default: the memory left on its device; on a CPU, at most 1GiB."""
    threads_per_rank: PositiveInt | None = None
    """CPU threads of one rank; default: an even share of the cores."""
    rebalance_every: Annotated[int, Field(ge=0)] | None = None
    """Steps between checks of the expert load balance; 0: never; default: 3000 where ep > 1."""
    rebalance_skew: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Also check as soon as the mean expert load of the ranks falls below this fraction of the largest load."""
    nodes_wait_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds to wait for nodes that have not started yet; 0: refuse a layout that does not fit now."""
