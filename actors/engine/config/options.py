"""The user options of an engine. The type, default and help text of each option are defined only here.

command line, Serve argument, YAML ──→ ServeArgs ──→ ReplicaSettings ──→ EngineConfig      all inherit `EngineOptions`
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from placement.model.bounds import PositiveInt

Seconds = Annotated[float, Field(gt=0)]


class EngineOptions(BaseModel):
    """The limits on what one engine runs at once and on what may wait."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, title="Engine")

    max_batch_tokens: PositiveInt = 2048
    """Maximum tokens of one step, on each attn_dp rank."""
    max_sequences: PositiveInt = 64
    """Maximum sequences running at once, on each attn_dp rank."""
    max_waiting: PositiveInt = 1024
    """Maximum waiting requests; further ones are refused (HTTP 429)."""
    max_waiting_tokens: PositiveInt = 1 << 20
    """Maximum waiting prompt tokens; a longer prompt is still accepted if no other request waits."""
    plans_in_flight: Annotated[int, Field(ge=1, le=16)] | None = None
    """Maximum steps sent to the ranks without a result; default: pipeline stages plus one."""
    step_timeout_s: Seconds = 60.0
    """Seconds after which a step counts as stuck, and its ranks are restarted."""


class EngineLimits(EngineOptions):
    """The engine options together with the length limit that follows from model and memory."""

    max_model_len: PositiveInt
    """Maximum tokens of a sequence, prompt and generated tokens together."""
