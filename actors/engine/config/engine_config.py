"""The configuration of one engine: sizes of the KV cache, of a step and of the queue, and the settings of KV transfer."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from actors.engine.config.balancing import Balancing
from actors.engine.config.options import EngineLimits, Seconds
from actors.kv_offload.block_part import KVFormat
from actors.wire.tier_config import TierConfig
from placement.layout import mesh
from placement.layout.layout import Layout
from placement.model.bounds import PositiveInt
from placement.model.spec import RopeSpec

CHUNK_TOKENS, POOL_CHUNK_TOKENS = 1024, 512
"""Maximum prompt tokens of one sequence in one step, outside of a pool and in one. In a pool a chunk is sent while the next one
is computed, so that only the transfer of the last chunk is exposed."""


class DisaggregationConfig(BaseModel):
    """The settings of prefill/decode disaggregation for an engine of a prefill or decode pool.

    Only `layout` differs between deployments. The other numbers belong to the protocol and are not options of ``serve``; tests
    shorten them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layout: Layout
    least_tokens: PositiveInt = 16
    """Minimum number of prompt tokens missing from the decode side's cache for which a prompt is handed off: one block."""
    expected_tokens: PositiveInt = 128
    """Number of output tokens for which blocks are reserved together with those of the prompt."""
    lease_s: Seconds = 60.0
    """Seconds from a reservation during which a write into it may begin; after that the decode side computes the prompt."""
    first_heartbeat_timeout_s: Seconds = 5.0
    """Seconds from issuing a ticket within which the first heartbeat of a prefill replica must arrive; otherwise none has the
    ticket, and the decode side computes the prompt."""
    heartbeat_timeout_s: Seconds = 20.0
    """Maximum seconds between two heartbeats; after that the decode side computes the prompt. The prefill side sends one a
    second, but none while a step runs, which may take long on a busy CPU."""
    grace_s: Seconds = 5.0
    """Seconds after a lease for writes that have begun to finish, and to cover the time that the ticket was in transit."""

    def ranks_of(self, dp_rank: int) -> frozenset[int]:
        """Return the world ranks that belong to the DP rank with index `dp_rank`."""
        return mesh.dp_rank_members(self.layout, dp_rank)


class OffloadConfig(BaseModel):
    """The settings of KV offload for an engine. `fetch_timeout_s` is not an option of ``serve``; tests shorten it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tiers: TierConfig
    layout: Layout
    kv_format: KVFormat
    block_bytes: PositiveInt
    """Bytes of one block on the rank that holds the largest part of it."""
    fetch_timeout_s: Seconds = 5.0
    """Seconds that a sequence waits for blocks requested from the tiers; after that its tokens are computed instead."""

    @property
    def capacity(self) -> int:
        """Number of blocks that the tiers can hold: that of the larger of a rank's host cache and its share of the
        directory."""
        shared = self.tiers.disk_cache_bytes if self.tiers.disk_cache is not None else 0
        return max(self.tiers.host_cache, shared // self.layout.world) // self.block_bytes

    def ranks_of(self, dp_rank: int) -> frozenset[int]:
        """Return the world ranks that belong to the DP rank with index `dp_rank`."""
        return mesh.dp_rank_members(self.layout, dp_rank)


class EngineConfig(EngineLimits):
    """The sizes and limits of one engine. `num_blocks` is the minimum over its ranks.

    A sequence's blocks are split over `kv_owners` ranks, block j to owner ``j % kv_owners`` (`placement.ownership.context`), so
    that ``kv_owners * num_blocks`` blocks can be in use at once on each of the `dp_size` DP ranks (attn_dp), each of which
    consists of separate ranks.

    User options are inherited; the other fields follow from the layout and the model. `max_chunk_tokens`, `micro_batch_rows`,
    `micro_batch_tokens`, `prefix_cache` and `overdue_after_s` are tuned values, not options: tests and benchmarks vary them.
    """

    model_config = ConfigDict(title="EngineConfig")

    num_blocks: PositiveInt
    """Number of KV blocks of one rank."""
    kv_owners: PositiveInt = 1
    """Number of ranks over which every sequence's blocks are split."""
    dp_size: PositiveInt = 1
    """Number of DP ranks: sets of ranks that each run their own sequences."""
    block_size: PositiveInt = 16
    """Number of tokens of one KV block."""
    max_chunk_tokens: PositiveInt = CHUNK_TOKENS
    """Maximum prompt tokens of one sequence in one step."""
    stages: PositiveInt = 1
    """Number of pipeline stages."""
    micro_batch_rows: PositiveInt = 4
    """Minimum size in sequences of the micro-batches into which decodes are split over the stages (`micro_batches.py`)."""
    micro_batch_tokens: PositiveInt = 128
    """Minimum prompt tokens of a step with several stages, if that many wait."""
    prefix_cache: bool = True
    """Whether blocks are shared between sequences with the same prefix."""
    overdue_after_s: Seconds = 30.0
    """Seconds in the queue after which a request precedes every later arrival, whatever its priority or tenant."""
    rope: RopeSpec = RopeSpec()
    """Rope of the model, which decides whether prompts of different lengths may share cached keys."""
    experts: Balancing | None = None
    """Settings of expert load balancing; None disables it."""
    offload: OffloadConfig | None = None
    """Settings of KV offload; None disables it."""
    disaggregation: DisaggregationConfig | None = None
    """Settings of prefill/decode disaggregation; None for an engine that belongs to no pool."""
    vocab_size: PositiveInt | None = None
    """Size of the vocabulary. If given, requests with token ids outside of it are refused before they reach a rank."""

    @property
    def moves_kv(self) -> bool:
        """Whether KV blocks are exchanged with other engines (disaggregation) or with KV tiers (offload)."""
        return self.disaggregation is not None or self.offload is not None

    @property
    def depth(self) -> int:
        """Maximum number of plans in flight."""
        return self.plans_in_flight or self.stages + 1

    @property
    def capacity(self) -> int:
        """Maximum number of tokens that one sequence can ever hold: the smaller of `max_model_len` and `cache_tokens`."""
        return min(self.max_model_len, self.cache_tokens)

    @property
    def cache_tokens(self) -> int:
        """Number of tokens that the pages of all KV owners of one DP rank can hold together."""
        return self.num_blocks * self.kv_owners * self.block_size

    def blocks_for(self, tokens: int) -> int:
        """Return the number of KV blocks needed for `tokens` tokens of one sequence, rounded up."""
        return -(-tokens // self.block_size)
