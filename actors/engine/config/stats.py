"""What an engine is doing, as numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict


@dataclass(slots=True)
class Counts:
    """What happened to requests since its scheduler was made."""

    steps: int = 0
    tokens_run: int = 0
    tokens_sampled: int = 0
    tokens_discarded: int = 0
    """Sampled for a sequence that had ended, or left the ranks, meanwhile."""
    cache_hit_tokens: int = 0
    preemptions: int = 0
    aborts: int = 0
    finished: int = 0


class ExpertStats(BaseModel):
    """What experts did since the balancer last looked: by layer of `layers`, or by world rank."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: list[int]
    top_tokens: list[int] = []
    """Tokens of the expert that ran most, by layer."""
    mean_tokens: list[float] = []
    balancedness: list[float] = []
    """Mean over maximum of the ranks' tokens, by layer: the part of their time that is used."""
    sent_bytes: list[int] = []
    """Of tokens on their way to experts and back, by rank."""
    expert_s: list[float] = []
    """Seconds of the experts' maths, by rank."""
    combine_s: list[float] = []
    """Seconds of the way back, waiting for slower ranks included, by rank."""
    straggler_share: float = 0.0
    """Part of the slowest rank's expert seconds that the ranks wait for it, in the mean over layers and ranks."""
    moved_experts: int = 0
    """Experts that went to other slots since the ranks started."""

    def gauges(self) -> dict[str, float]:
        """Each number under its name, with the layer or rank it is of."""
        found = {"experts_straggler_share": self.straggler_share, "experts_moved": float(self.moved_experts)}
        by_layer: dict[str, Iterable[float]] = {
            "top_tokens": self.top_tokens,
            "mean_tokens": self.mean_tokens,
            "balancedness": self.balancedness,
        }
        by_rank: dict[str, Iterable[float]] = {
            "sent_bytes": self.sent_bytes,
            "expert_seconds": self.expert_s,
            "combine_seconds": self.combine_s,
        }
        for name, values in by_layer.items():
            found |= {f"experts_{name}:layer={layer}": float(value) for layer, value in zip(self.layers, values, strict=False)}
        for name, values in by_rank.items():
            found |= {f"experts_{name}:rank={rank}": float(value) for rank, value in enumerate(values)}
        return found


class HandoffStats(BaseModel):
    """Hand-offs of one engine of a pool. Counters rise from the start of its ranks; bytes and seconds are sums over ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reserved: int
    """Reservations whose sequences wait for their prompts."""
    draining: int
    """Reservations nobody waits for, into which somebody may still write."""
    sending: int
    """Prompts that ranks have not sent whole."""
    reservations: int
    reservation_wait_s: float
    """From the arrival of requests to their blocks."""
    received: int
    fallen_back: int
    """Prompts computed here since the prefill side failed or was late."""
    outlived: int
    """Reservations given up when their lease was over, since their writer was never heard of again."""
    sent: int
    failed: int
    sent_bytes: int
    transfer_s: float
    """In which ranks had writes under way."""
    exposed_s: float
    """The part of that after the last chunk of the prompt was computed."""
    overlap: float
    """Part of the transfers' time that computing hid."""


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
    tier_saved_blocks: int = 0
    """Blocks put away in the tiers behind the device."""
    tier_asked_tokens: int = 0
    """Prompt tokens whose blocks were looked for there, and those found."""
    tier_found_tokens: int = 0
    tier_late: int = 0
    """Prompts that were computed since their blocks did not come from there in time."""
    tier_hits: dict[str, int] = {}
    """Block parts that ranks fetched, by tier (``host``, ``shared``), those missed, and those not written."""
    experts: ExpertStats | None = None
    """None where experts are not balanced."""
    handoffs: HandoffStats | None = None
    """None for an engine that belongs to no pool."""

    def gauges(self) -> dict[str, float]:
        """The numbers that are one number, and those of experts by layer and rank: ``experts_sent_bytes:rank=3``."""
        plain = {name: float(value) for name, value in self.model_dump().items() if isinstance(value, (int, float))}
        handoff = {} if self.handoffs is None else self.handoffs.model_dump()
        plain |= {f"handoff_{name}": float(value) for name, value in handoff.items()}
        plain |= {f"tier_block_parts:tier={tier}": float(count) for tier, count in self.tier_hits.items()}
        return plain | (self.experts.gauges() if self.experts is not None else {})
