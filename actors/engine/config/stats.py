"""The statistics of an engine: snapshots of its queues, KV blocks, steps, experts and KV transfers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict


@dataclass(slots=True)
class Counts:
    """Counters of a scheduler since it was created."""

    steps: int = 0
    tokens_run: int = 0
    tokens_sampled: int = 0
    tokens_discarded: int = 0
    """Tokens sampled for a sequence that had meanwhile ended or been preempted."""
    cache_hit_tokens: int = 0
    preemptions: int = 0
    aborts: int = 0
    finished: int = 0


class ExpertStats(BaseModel):
    """Statistics of the experts over the balancer's latest window. Lists are by layer of `layers` or by world rank."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: list[int]
    top_tokens: list[int] = []
    """Tokens of the most loaded expert, by layer."""
    mean_tokens: list[float] = []
    """Mean tokens per expert, by layer."""
    balancedness: list[float] = []
    """Mean over maximum of the ranks' tokens, by layer: the fraction of the ranks' expert time that is used."""
    sent_bytes: list[int] = []
    """Bytes sent for dispatching tokens to experts and combining their outputs, by rank."""
    expert_s: list[float] = []
    """Seconds of expert computation, by rank."""
    combine_s: list[float] = []
    """Seconds of the combine step, the wait for slower ranks included, by rank."""
    straggler_share: float = 0.0
    """Fraction of the slowest rank's expert seconds during which the ranks wait for it, averaged over layers and ranks."""
    moved_experts: int = 0
    """Number of experts moved to other slots since the ranks started."""

    def gauges(self) -> dict[str, float]:
        """Return each number by metric name. Numbers of a layer or rank have it as a label after a colon, as in
        ``experts_sent_bytes:rank=3``."""
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
    """Statistics of prefill/decode disaggregation of one engine of a pool.

    Counters start at 0 with the ranks. Bytes and seconds are sums over the ranks.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    reserved: int
    """Current reservations whose sequences wait for their prompts to be computed."""
    draining: int
    """Current reservations for which no sequence waits, but into which a prefill side may still write."""
    sending: int
    """Prompts that are not sent completely."""
    reservations: int
    """Reservations made."""
    reservation_wait_s: float
    """Seconds from the arrival of requests to the reservation of their blocks, summed over requests."""
    received: int
    """Prompts received completely."""
    fallen_back: int
    """Prompts computed by this engine because the prefill side failed or was late."""
    outlived: int
    """Reservations freed only after lease and grace time, because the prefill side never reported the end of its writes."""
    sent: int
    """Prompts sent completely."""
    failed: int
    """Prompts whose sending was stopped."""
    sent_bytes: int
    """Bytes of KV sent."""
    transfer_s: float
    """Seconds during which ranks had writes in flight."""
    exposed_s: float
    """The part of `transfer_s` that did not overlap with computation (`KVSent`)."""
    overlap: float
    """The fraction of `transfer_s` that overlapped with computation."""


class EngineStats(BaseModel):
    """A snapshot of an engine's state and counters.

    Counters start at 0 with the current set of ranks. Times are in seconds on the engine's clock.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    running: int
    waiting: int
    """Requests that are accepted but not running, preempted ones included."""
    waiting_tokens: int
    total_blocks: int
    free_blocks: int
    """Blocks that hold no KV."""
    cached_blocks: int
    """Blocks that no sequence uses, but that the prefix cache can still hit or evict."""
    steps: int
    tokens_run: int
    tokens_sampled: int
    tokens_discarded: int
    """Tokens sampled for requests that had meanwhile ended or been preempted."""
    cache_hit_tokens: int
    preemptions: int
    aborts: int
    finished: int
    last_step_at: float | None
    """Time at which the last step's result was applied."""
    busy_since: float | None
    """Time at which the current iteration of the loop (plan, step, delivery) began; None while the engine is idle."""
    step_seconds: float
    """Sum of the durations of all steps, each from sending the plan to receiving its result."""
    pipeline_seconds: float
    """Seconds with plans in flight."""
    stage_busy_seconds: float
    """Seconds during which pipeline stages were busy, summed over stages."""
    pipeline_bubble: float | None
    """Fraction of the latest steps' time during which stages were idle; None with a single stage."""
    recent_step_s: tuple[float, ...]
    """Durations of the latest steps, oldest first."""
    tier_saved_blocks: int = 0
    """Blocks saved to the KV tiers."""
    tier_asked_tokens: int = 0
    """Prompt tokens whose blocks were requested from the tiers."""
    tier_found_tokens: int = 0
    """Prompt tokens whose blocks were found in the tiers."""
    tier_late: int = 0
    """Prompts that were computed because the tiers did not deliver their blocks in time."""
    tier_hits: dict[str, int] = {}
    """Block parts that ranks fetched, by tier (``host``, ``shared``), those missed, and those not written."""
    experts: ExpertStats | None = None
    """Expert statistics; None if experts are not balanced."""
    handoffs: HandoffStats | None = None
    """Statistics of prefill/decode disaggregation; None for an engine that belongs to no pool."""

    def gauges(self) -> dict[str, float]:
        """Return all statistics that are single numbers by metric name, with those of hand-offs, KV tiers and experts.

        Names of hand-off statistics begin with ``handoff_``. A label follows a colon, as in ``experts_sent_bytes:rank=3`` or
        ``tier_block_parts:tier=host``. Values that are None are omitted.
        """
        plain = {name: float(value) for name, value in self.model_dump().items() if isinstance(value, (int, float))}
        handoff = {} if self.handoffs is None else self.handoffs.model_dump()
        plain |= {f"handoff_{name}": float(value) for name, value in handoff.items()}
        plain |= {f"tier_block_parts:tier={tier}": float(count) for tier, count in self.tier_hits.items()}
        return plain | (self.experts.gauges() if self.experts is not None else {})
