"""Which tiers stand behind the pages of a replica's ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

ByteCount = Annotated[int, Field(ge=0)]


class TierConfig(BaseModel):
    """Host memory of `host_bytes` for each rank (0: none), and a directory of `directory_bytes` for all that use it together
    (None: none).

    `model_digest`: see `placement.model.digest`; blocks of other models are never found.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_digest: str
    host_bytes: ByteCount = 0
    directory: Path | None = None
    directory_bytes: ByteCount = 16 << 30

    @model_validator(mode="after")
    def _there_is_one(self) -> Self:
        if not self.host_bytes and self.directory is None:
            raise ValueError("host_bytes=0 and no directory: there is no tier")
        return self
