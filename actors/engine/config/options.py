"""The engine options that a user may set. Each option has its type, default and help text here, and nowhere else.

command line, Serve argument, YAML ──→ ServeArgs ──→ ReplicaSettings ──→ EngineConfig      all inherit `EngineOptions`
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from placement.model.bounds import PositiveInt

Seconds = Annotated[float, Field(gt=0)]


class EngineOptions(BaseModel):
    """Limits of one engine: how much it runs in one step (continuous batching), and how many requests may wait."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, title="Engine")

    max_batch_tokens: PositiveInt = 2048
    """Maximum number of tokens that one step runs on each attn_dp rank."""
    max_sequences: Annotated[PositiveInt, Field(validate_default=True)] = 64
    """Maximum number of sequences that run at once on each attn_dp rank."""
    max_waiting: PositiveInt = 1024
    """Maximum number of waiting requests; further requests are refused (HTTP 429)."""
    max_waiting_tokens: PositiveInt = 1 << 20
    """Maximum number of waiting prompt tokens; a longer prompt is still accepted when nothing else waits."""
    plans_in_flight: Annotated[int, Field(ge=1, le=16)] | None = None
    """Maximum number of steps sent to the ranks before the oldest result is back; default: pipeline stages plus one."""
    step_timeout_s: Seconds = 60.0
    """Seconds after which a step counts as stuck and its ranks are restarted."""

    @field_validator("max_sequences")
    @classmethod
    def _every_running_sequence_fits_a_step(cls, count: int, info: ValidationInfo) -> int:
        budget = info.data.get("max_batch_tokens", count)
        if count > budget:
            raise ValueError(
                f"max_sequences={count} exceeds max_batch_tokens={budget}: a step must have room for one token of every "
                f"running sequence; use max_batch_tokens >= {count}"
            )
        return count


class EngineLimits(EngineOptions):
    """The engine options, together with the limit that follows from the model and its memory."""

    max_model_len: PositiveInt
    """Maximum number of tokens in a sequence, prompt and generated tokens together."""
