"""How one engine is set up: sizes of the cache, of a step and of the queue."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator

from actors.engine.config.balancing import Balancing
from actors.engine.config.options import EngineLimits, Seconds
from actors.kv_offload.block_part import KVFormat
from actors.wire.tier_config import TierConfig
from placement.layout import mesh
from placement.layout.layout import Layout
from placement.model.bounds import PositiveInt
from placement.model.spec import RopeSpec

CHUNK_TOKENS, POOL_CHUNK_TOKENS = 1024, 512
"""Prompt tokens of one sequence in one step at most, alone and in a pool. In a pool a chunk is sent while the next one is
computed, and everybody waits for the last one."""


class DisaggregationConfig(BaseModel):
    """What an engine of a pool must know beside its sizes, to hand off KV or to take it.

    Only `layout` differs between deployments. The other numbers belong to the protocol and are no options of ``serve``; tests
    shorten them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layout: Layout
    least_tokens: PositiveInt = 16
    """A prompt is handed off if at least so many of its tokens are not in the decode side's cache: a block's worth."""
    expected_tokens: PositiveInt = 128
    """Tokens of output for which blocks are reserved together with the prompt's."""
    lease_s: Seconds = 60.0
    """From a reservation to the last moment at which a write into it may begin; then the decode side computes the prompt."""
    first_heartbeat_timeout_s: Seconds = 5.0
    """From a ticket to the first heartbeat of a prefill replica that has it; then there is none."""
    heartbeat_timeout_s: Seconds = 20.0
    """From each heartbeat to the next; then the decode side computes the prompt. A prefill side sends one a second, but none
    while a step runs, which may take long where a CPU is busy."""
    grace_s: Seconds = 5.0
    """After a lease: for a write that has begun to end, and for the time the ticket was on its way."""

    def ranks_of(self, dp_rank: int) -> frozenset[int]:
        """World ranks of a DP rank."""
        return mesh.dp_rank_members(self.layout, dp_rank)


class OffloadConfig(BaseModel):
    """What an engine must know of the tiers behind its ranks. `fetch_timeout_s` is no option of ``serve``; tests shorten it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tiers: TierConfig
    layout: Layout
    kv_format: KVFormat
    block_bytes: PositiveInt
    """Of one block, on the rank that keeps most of it."""
    fetch_timeout_s: Seconds = 5.0
    """From asking the ranks for blocks to the last moment at which their sequence waits for them; then it is computed."""

    @property
    def capacity(self) -> int:
        """Blocks that the tiers hold."""
        shared = self.tiers.disk_cache_bytes if self.tiers.disk_cache is not None else 0
        return max(self.tiers.host_cache, shared // self.layout.world) // self.block_bytes

    def ranks_of(self, dp_rank: int) -> frozenset[int]:
        """World ranks of a DP rank."""
        return mesh.dp_rank_members(self.layout, dp_rank)


class EngineConfig(EngineLimits):
    """Sizes and limits of one engine. Frozen; `num_blocks` is what the ranks could agree on (their minimum).

    A sequence's blocks are split over `kv_owners` ranks, block j to owner ``j % kv_owners`` (`placement.ownership.context`),
    so that
    ``kv_owners * num_blocks`` blocks can be in use at once; on each of the `dp_size` DP ranks, which have ranks of their own
    (attn_dp).

    What a user sets is inherited; the rest follows from the layout and the model. `max_chunk_tokens`, `micro_batch_rows`,
    `micro_batch_tokens`, `prefix_cache` and `overdue_after_s` are tuned values, no options: tests and benchmarks vary them.
    """

    num_blocks: PositiveInt
    """KV blocks of one rank."""
    kv_owners: PositiveInt = 1
    """Ranks that each hold a share of every sequence's blocks."""
    dp_size: PositiveInt = 1
    """Sets of ranks that each run sequences of their own."""
    block_size: PositiveInt = 16
    """Tokens of one KV block."""
    max_chunk_tokens: PositiveInt = CHUNK_TOKENS
    """Prompt tokens of one sequence in one step at most."""
    stages: PositiveInt = 1
    """Pipeline stages of the ranks."""
    micro_batch_rows: PositiveInt = 4
    """Decodes are split over the stages into micro-batches of at least so many (`micro_batches.py`)."""
    micro_batch_tokens: PositiveInt = 128
    """Prompt tokens that a step of several stages takes where there are that many."""
    prefix_cache: bool = True
    overdue_after_s: Seconds = 30.0
    """A request queued this long goes ahead of everything that arrived after it, whatever its priority or tenant."""
    rope: RopeSpec = RopeSpec()
    """The model's: whether prompts of unlike length may share cached keys depends on it."""
    experts: Balancing | None = None
    """How experts are balanced while serving; None: they stay where they are."""
    offload: OffloadConfig | None = None
    """None: blocks do not outlive the device."""
    disaggregation: DisaggregationConfig | None = None
    """None: this engine neither hands off KV nor takes it."""
    vocab_size: PositiveInt | None = None
    """Where given, prompts with other token ids are refused before they reach a rank."""

    @property
    def moves_kv(self) -> bool:
        """Whether KV blocks come from somewhere else, or go there: a pool's, or the tiers'."""
        return self.disaggregation is not None or self.offload is not None

    @property
    def depth(self) -> int:
        """Plans in flight at most."""
        return self.plans_in_flight or self.stages + 1

    @property
    def capacity(self) -> int:
        """Tokens that one sequence can ever hold: the smaller of `max_model_len` and `cache_tokens`."""
        return min(self.max_model_len, self.cache_tokens)

    @property
    def cache_tokens(self) -> int:
        """Tokens that the pages of all owners hold together, on one DP rank."""
        return self.num_blocks * self.kv_owners * self.block_size

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    @model_validator(mode="after")
    def _every_running_sequence_fits_a_step(self) -> Self:
        if self.max_sequences > self.max_batch_tokens:
            raise ValueError(
                f"max_sequences={self.max_sequences} exceeds max_batch_tokens={self.max_batch_tokens}: a step must have room "
                f"for one token of every running sequence; use max_batch_tokens >= {self.max_sequences}"
            )
        return self
