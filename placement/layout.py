"""The parallel layout: one frozen value that says how many ranks hold what.

    stage_ranks = attn_dp * cp * tp = moe_dp * ep * moe_tp
    world       = pp * stage_ranks            (ranks of one replica)
    devices     = replicas * world

Text form, used by every command, config and error: ``tp=2,pp=2`` (fields not named are 1).
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

Size = Annotated[int, Field(ge=1)]
"""Number of ranks along one axis."""

_LIST_SEPARATOR = "/"
"""Separates the entries of a list field in the text form: ``stage_layers=16/14``."""


class LayoutError(ValueError):
    """A layout text that cannot be read, or a layout that breaks rules. ``str()`` is the whole message."""


class Layout(BaseModel):
    """Parallel sizes of a deployment. Every size counts ranks (devices) and defaults to 1 (or off)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    replicas: Size = 1
    pp: Size = 1
    attn_dp: Size = 1
    cp: Size = 1
    tp: Size = 1
    dcp: Size = 1
    ep: Size = 1
    moe_tp: Size = 1
    moe_dp: Size = 1
    sp: bool = False
    redundant_experts: Annotated[int, Field(ge=0)] = 0
    stage_layers: tuple[Size, ...] | None = None
    tp_shares: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    cp_style: Literal["ring", "allgather"] = "ring"

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.attn_dp * self.cp * self.tp

    @property
    def world(self) -> int:
        """Ranks of one replica."""
        return self.pp * self.stage_ranks

    @property
    def devices(self) -> int:
        """Ranks of the whole deployment."""
        return self.replicas * self.world

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form, for example ``tp=2,pp=2,stage_layers=16/14``. Raises `LayoutError`."""
        raise LayoutError(f"not read yet: {text}")

    def __str__(self) -> str:
        """The shortest text form: fields at their default are left out; the single rank is ``tp=1``."""
        return ""
