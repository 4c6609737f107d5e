"""Options of the KV tiers (KV offload to host memory and disk) behind the KV pages of a replica's ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from placement.cost.units import ByteCount


class TierOptions(BaseModel):
    """The KV offload options that a user may set. Each option has its type, default and help text here, and nowhere else."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, title="KV offload")

    host_cache: Annotated[ByteCount, Field(ge=0)] = 0
    """Host memory of each rank for KV blocks evicted from its device, for example 4GiB; 0: none."""
    disk_cache: Path | None = None
    """Directory for KV blocks that remain after the server has stopped; several servers may share it."""
    disk_cache_bytes: Annotated[ByteCount, Field(ge=1)] = 16 << 30
    """Maximum number of bytes in that directory, for all its users together."""


class TierConfig(TierOptions):
    """The KV tiers of one replica: host memory, a directory, or both."""

    model_config = ConfigDict(title="TierConfig")

    @model_validator(mode="after")
    def _there_is_one(self) -> Self:
        if not self.host_cache and self.disk_cache is None:
            raise ValueError("host_cache=0 and no disk_cache: there is no tier")
        return self
