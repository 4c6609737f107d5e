"""Memory of each rank: its weights, and the number of KV blocks that fit beside them.

All ranks use one block table, so all have the same number of KV blocks: the smallest number that fits on any of them::

    budget of a rank = weights + activations + num_blocks * BLOCK_TOKENS * kv_bytes_per_token + unused

With context parallelism a sequence's blocks are split over ``kv_owners = cp * dcp`` ranks (`placement.ownership.context`). A
token still takes `kv_bytes_per_token` on the rank that holds it, but a rank holds only one in `kv_owners` tokens::

    cp=2      num_blocks = 100 on every rank  ->  a sequence of up to 200 blocks, 100 of them on each cp rank

Each DP rank (attn_dp) has blocks of its own, for its own requests.

Activations (`placement.cost.activations`) are subtracted with the weights if the limits of a step are given. The budget does
not cover the runtime's own memory: the caller subtracts it beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from placement.cost.activations import StepLimits, activation_bytes
from placement.layout.layout import Layout, LayoutError
from placement.layout.mesh import coords_of
from placement.model.spec import DTYPE_BYTES, DType, ModelSpec
from placement.nodes.hardware import ClusterSpec
from placement.ownership.context import BLOCK_TOKENS
from placement.ownership.shard import Shard
from placement.ownership.shards import parameters, shard
from placement.ownership.weight_slices import Parameter


class MemoryBudgetError(LayoutError):
    """The weights of a model, or its KV cache for one sequence, do not fit into the memory of a rank."""

    code = "memory_budget"


@dataclass(frozen=True)
class RankMemory:
    """Memory needs of one rank of a replica.

    `kv_bytes_per_token` counts a token whose KV this rank holds: one in `kv_owners` tokens of a long sequence. Sliding windows
    do not reduce it, since every layer keeps every block.
    """

    world_rank: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_owners: int = 1
    activation_bytes: int = 0
    """Bytes that the largest step takes besides weights and KV; 0 if they are not counted."""

    @property
    def fixed_bytes(self) -> int:
        """Bytes that the rank needs whatever the size of its KV cache: weights and activations."""
        return self.weight_bytes + self.activation_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block (`BLOCK_TOKENS` tokens) in all layers of the rank."""
        return BLOCK_TOKENS * self.kv_bytes_per_token

    def tokens_in(self, kv_bytes: int) -> int:
        """Returns the tokens of one sequence that fit, in whole blocks, if this rank and the other owners of its blocks each
        have `kv_bytes` bytes of KV cache."""
        return kv_bytes // self.block_bytes * self.kv_owners * BLOCK_TOKENS

    def blocks_of(self, tokens: int) -> int:
        """Returns the number of KV blocks that this rank must hold at most for a sequence of `tokens` tokens: its share of the
        blocks, rounded up."""
        return -(-tokens // (BLOCK_TOKENS * self.kv_owners))

    def blocks_in(self, budget_bytes: int) -> int:
        """Returns the number of KV blocks that fit into `budget_bytes` bytes beside weights and activations; negative if these
        alone do not fit."""
        return (budget_bytes - self.fixed_bytes) // self.block_bytes


def parameter_count(spec: ModelSpec) -> int:
    """Returns the number of parameters of the model, over all ranks of one replica together. Tied embeddings count once,
    padding does not count."""
    single = Layout()
    slices = (
        weight_slice
        for parameter in parameters(spec, shard(spec, single, coords_of(single, 0)))
        for weight_slice in parameter.slices
    )
    return sum(prod(weight_slice.shape) for weight_slice in slices)


def weight_bytes(spec: ModelSpec, own: Shard, dtype: DType | None = None) -> int:
    """Returns the bytes of the weights of the rank with the shard `own`, in `dtype` (None: the model's), padding rows
    included."""
    return sum(parameter_bytes(parameter, dtype or spec.dtype) for parameter in parameters(spec, own))


def parameter_bytes(parameter: Parameter, dtype: DType) -> int:
    """Returns the bytes of a rank's parameter if weights are stored in `dtype`; a parameter marked `fp32` takes 4 bytes per
    element anyway."""
    return prod(parameter.shape) * DTYPE_BYTES["float32" if parameter.fp32 else dtype]


def kv_bytes_per_token(spec: ModelSpec, own: Shard, dtype: DType | None = None) -> int:
    """Returns the bytes of K and V (or of the latent) per token on a rank that holds it, in all layers of the rank.

    `own` is the rank's shard, `dtype` the type of the KV cache (None: the model's). A KV head that several ranks hold counts on
    each of them. With dcp each of them holds only some of the positions.
    """
    per_kind = [len(kv_heads) * kind.cached_dim for kind, (_, kv_heads) in zip(spec.kinds, own.heads, strict=True)]
    return sum(per_kind[spec.kind_of(layer)] for layer in own.layers) * DTYPE_BYTES[dtype or spec.dtype]


def rank_memories(
    spec: ModelSpec,
    layout: Layout,
    dtype: DType | None = None,
    kv_dtype: DType | None = None,
    limits: StepLimits | None = None,
    gathers: bool = True,
) -> list[RankMemory]:
    """Returns the memory needs of every rank of one replica, by world rank. `dtype` is the type of the weights (None: the
    model's), `kv_dtype` that of the KV cache (None: `dtype`).

    Activations are those of the largest step of `limits`, and not counted without it; `gathers` is that of `activation_bytes`.
    """
    owns = (shard(spec, layout, coords_of(layout, rank)) for rank in range(layout.world))
    return [
        RankMemory(
            world_rank=rank,
            weight_bytes=weight_bytes(spec, own, dtype),
            kv_bytes_per_token=kv_bytes_per_token(spec, own, kv_dtype or dtype),
            kv_owners=layout.kv_owners,
            activation_bytes=0 if limits is None else activation_bytes(spec, layout, own, dtype or spec.dtype, limits, gathers),
        )
        for rank, own in enumerate(owns)
    ]


def num_blocks(ranks: Sequence[RankMemory], budget_bytes: int | Sequence[int], max_length: int) -> int:
    """Returns the number of KV blocks that fit on every rank of `ranks`, a replica's memory needs.

    `budget_bytes` is the bytes for weights, activations and KV: one number for all ranks, or one per rank. Raises
    `MemoryBudgetError` unless one sequence of `max_length` tokens fits: with fewer blocks, a request of legal length could
    never finish.
    """
    budgets = [budget_bytes] * len(ranks) if isinstance(budget_bytes, int) else budget_bytes
    needed = ranks[0].blocks_of(max_length)
    room = [(rank.blocks_in(budget), rank, budget) for rank, budget in zip(ranks, budgets, strict=True)]
    blocks, tightest, budget = min(room, key=lambda entry: entry[0])
    if blocks < needed:
        raise MemoryBudgetError(_shortage(tightest, budget, blocks, needed, max_length))
    return blocks


def slot_bytes(cluster: ClusterSpec) -> int | None:
    """Returns the bytes of memory that a rank has on any node: the least memory per slot over the nodes of known memory; None
    if it is unknown for all."""
    known = [node.memory_bytes // node.slots for node in cluster.nodes if node.slots and node.memory_bytes is not None]
    return min(known, default=None)


def _shortage(rank: RankMemory, budget: int, blocks: int, needed: int, max_length: int) -> str:
    least = rank.fixed_bytes + needed * rank.block_bytes
    activations = f"activations of a step {rank.activation_bytes:,}, " if rank.activation_bytes else ""
    remedies = [f"give it {least:,} bytes", "split the model over more ranks (a larger tp or pp)"]
    if blocks > 0:
        remedies.insert(0, f"allow sequences of at most {blocks * BLOCK_TOKENS * rank.kv_owners:,} tokens")
    return (
        f"world rank {rank.world_rank} has {budget:,} bytes for weights and KV cache: its weights take {rank.weight_bytes:,}, "
        f"{activations}and {_share(rank)} of {max_length:,} tokens takes {needed:,} KV blocks of {rank.block_bytes:,}, of "
        f"which {max(blocks, 0):,} fit. Remedies: {'; '.join(remedies)}"
    )


def _share(rank: RankMemory) -> str:
    return "one sequence" if rank.kv_owners == 1 else f"its share (1 of {rank.kv_owners}) of one sequence"
