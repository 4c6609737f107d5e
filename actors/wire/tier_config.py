"""The settings of KV offload: the KV tiers (host memory, disk directory) behind the pages of a replica's ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from placement.cost.units import ByteCount


class TierOptions(BaseModel):
    """User options of KV offload. The type, default and help text of each option are defined only here."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, title="KV offload")

    host_cache: Annotated[ByteCount, Field(ge=0)] = 0
    """Host memory of each rank for KV blocks evicted from its device, for example 4GiB; 0 disables it."""
    disk_cache: Path | None = None
    """Directory for KV blocks that outlive the server; several servers may share it."""
    disk_cache_bytes: Annotated[ByteCount, Field(ge=1)] = 16 << 30
    """Maximum bytes of KV blocks in that directory, over all servers that share it."""


class TierConfig(TierOptions):
    """The tiers of one model's replica: host memory, a directory, or both.

    `model_digest` identifies the model (see `placement.model.digest`), so that blocks of other models are never found.
    """

    model_digest: str

    @model_validator(mode="after")
    def _there_is_one(self) -> Self:
        if not self.host_cache and self.disk_cache is None:
            raise ValueError("host_cache=0 and no disk_cache: there is no tier")
        return self
