"""What an engine is doing, as numbers."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class EngineStats(BaseModel):
    """A snapshot. Counters rise from the start of the current set of ranks; times are on the engine's clock, in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    running: int
    waiting: int
    """Requests accepted and not running (preempted ones included)."""
    waiting_tokens: int
    total_blocks: int
    free_blocks: int
    """Blocks that hold nothing."""
    cached_blocks: int
    """Blocks nobody uses that can be hit, or evicted."""
    steps: int
    tokens_run: int
    tokens_sampled: int
    tokens_discarded: int
    """Sampled for requests that had ended, or were preempted, by the time."""
    cache_hit_tokens: int
    preemptions: int
    aborts: int
    finished: int
    last_step_at: float | None
    """When the last step's result was applied."""
    busy_since: float | None
    """When the turn in progress (plan, step, delivery) began; None while there is nothing to do."""
    step_seconds: float
    """Sum of the durations of all steps, from sending the plan to its result."""
    pipeline_seconds: float
    """Time with plans in flight."""
    stage_busy_seconds: float
    """Time the pipeline's stages were busy, added up over them."""
    pipeline_bubble: float | None
    """Part of the latest steps' time that stages idled; None where there is one stage."""
    recent_step_s: tuple[float, ...]
    """Durations of the latest steps, oldest first."""
