"""What a user may set of a replica: the options of its engine and of its KV tiers, and those of its ranks."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from actors.engine.config.options import EngineOptions
from actors.wire.tier_config import TierOptions
from placement.cost.units import ByteCount
from placement.model.bounds import PositiveInt


class ReplicaOptions(EngineOptions, TierOptions):
    """The same for every replica of a deployment. `ServeArgs` and `ReplicaSettings` both inherit them."""

    model_config = ConfigDict(title="Ranks of a replica")

    kv_bytes: Annotated[ByteCount, Field(ge=1)] | None = None
    """KV cache of one rank, for example 2GiB; default: what its device has left, on a CPU 1GiB at most."""
    threads_per_rank: PositiveInt | None = None
    """CPU threads of one rank; default: an even share of the cores."""
    rebalance_every: Annotated[int, Field(ge=0)] | None = None
    """Steps between looks at how evenly experts are loaded; 0: never; default: 3000 where ep > 1."""
    rebalance_skew: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Look at once when the mean load of ranks with experts falls below this part of the largest."""
    nodes_wait_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds to wait for nodes that are still to start; 0: a layout that does not fit now is refused at once."""
