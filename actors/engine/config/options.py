"""What a user may set of an engine. Each option has its type, default and help text here, and nowhere else.

command line, Serve argument, YAML ──→ ServeArgs ──→ ReplicaSettings ──→ EngineConfig      all inherit `EngineOptions`
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from placement.model.bounds import PositiveInt

Seconds = Annotated[float, Field(gt=0)]


class EngineOptions(BaseModel):
    """How much one engine runs at once, and how much may wait."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, title="Engine")

    max_batch_tokens: PositiveInt = 2048
    """Tokens that one step runs at most, on each attn_dp rank."""
    max_sequences: PositiveInt = 64
    """Sequences that run at once at most, on each attn_dp rank."""
    max_waiting: PositiveInt = 1024
    """Requests that wait at most; further ones are refused (HTTP 429)."""
    max_waiting_tokens: PositiveInt = 1 << 20
    """Prompt tokens that wait at most; a longer prompt is still taken when nothing else waits."""
    plans_in_flight: Annotated[int, Field(ge=1, le=16)] | None = None
    """Steps sent to the ranks before the oldest one's result is back; default: pipeline stages plus one."""
    step_timeout_s: Seconds = 60.0
    """Seconds after which a step counts as stuck, and its ranks are restarted."""


class EngineLimits(EngineOptions):
    """The options together with the limit that follows from model and memory."""

    max_model_len: PositiveInt
    """Tokens of a sequence at most, prompt and generated together."""
