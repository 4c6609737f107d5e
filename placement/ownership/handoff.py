"""The hand-off map (prefill/decode disaggregation): which rank sends which part of a sequence's KV cache to which rank.

Both sides serve the same model, under any two layouts. `placement.ownership.shards` determines which layers and KV heads a rank
keeps, `placement.ownership.context` which positions. Prefill ``tp=2`` to decode ``pp=2``, for 3 KV heads and 4 layers::

    source                     layers 0-1                layers 2-3
      rank 0  heads 0 1        -> rank 0  (heads 0 1)    -> rank 1  (heads 0 1)
      rank 1  head  2          -> rank 0  (head  2)      -> rank 1  (head  2)

A destination receives each (layer, head, position) that it keeps exactly once, from one source. If several sources keep the
same data (more tp ranks than KV heads; latents under any tp), they share the work layer by layer: each first serves the
destination with its own rank number, up to an even share, and the rest is split in order. One head, four sources, two
destinations::

    one KV head, 8 layers     prefill tp=4                          decode pp=2
                              rank 0: layers 0-1 -> rank 0          rank 0  layers 0-3
                              rank 1: layers 4-5 -> rank 1          rank 1  layers 4-7
                              rank 2: layers 2-3 -> rank 0
                              rank 3: layers 6-7 -> rank 1
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from placement.layout.layout import Layout
from placement.layout.mesh import coords_of
from placement.model.attention_kind import AttentionKind
from placement.model.spec import DTYPE_BYTES, DType, ModelError, ModelSpec
from placement.ownership.context import BLOCK_TOKENS, ContextRank, Ownership
from placement.ownership.handoff_positions import PeriodicPositions, shared
from placement.ownership.shards import shard


@dataclass(frozen=True)
class Side:
    """One side of a hand-off: the layout of a replica, the tokens per page, and the DP rank that has the sequence.

    Raises `ValueError` if the layout has no such DP rank, or if a page holds less than one token.
    """

    layout: Layout
    page_tokens: int = BLOCK_TOKENS
    dp_rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.dp_rank < self.layout.attn_dp:
            raise ValueError(
                f"DP rank {self.dp_rank} is not one of the {self.layout.attn_dp} DP ranks (attn_dp) of {self.layout}"
            )
        if self.page_tokens < 1:
            raise ValueError(f"page_tokens={self.page_tokens}: a page holds at least one token")


@dataclass(frozen=True)
class Holding:
    """The part of every sequence of its DP rank that one rank keeps. MLA latents count as one KV head."""

    world_rank: int
    layers: range
    kv_heads: range
    ownership: Ownership


@dataclass(frozen=True)
class Copy:
    """The data that one rank sends to another: all of `kv_heads` in all of `layers` at all of `positions`.

    `source` and `destination` are world ranks of the two replicas.
    """

    source: int
    destination: int
    layers: range
    kv_heads: range
    positions: PeriodicPositions

    def within(self, layers: range, positions: range) -> Copy | None:
        """Returns the part of the copy in a range of layers and a range of positions, or None if that part is empty."""
        part = replace(self, layers=_overlap(self.layers, layers), positions=self.positions.within(positions))
        return part if part.layers and len(part.positions) else None

    def num_bytes(self, spec: ModelSpec, dtype: DType) -> int:
        """Returns the number of bytes that the copy transfers, for a KV cache of type `dtype`."""
        return len(self.layers) * len(self.kv_heads) * len(self.positions) * head_bytes(spec, dtype)


@dataclass(frozen=True)
class _Need:
    """The data that one destination needs from a set of source ranks which keep the same."""

    world_rank: int
    layers: range
    kv_heads: range
    positions: PeriodicPositions

    @property
    def weight(self) -> int:
        """Amount of data per layer: KV heads times positions."""
        return len(self.kv_heads) * len(self.positions)


def head_bytes(spec: ModelSpec, dtype: DType) -> int:
    """Returns the bytes of one KV head of one token in one layer, K and V (or the latent) together, for a KV cache of type
    `dtype`."""
    return spec.kv_planes * spec.kv_dim * DTYPE_BYTES[dtype]


def sequence_bytes(spec: ModelSpec, tokens: int, dtype: DType) -> int:
    """Returns the bytes of the KV cache, of type `dtype`, of a sequence of `tokens` tokens in all layers; each value counts
    once, even if several ranks keep it."""
    return tokens * spec.num_layers * spec.num_kv_heads * head_bytes(spec, dtype)


def holdings(spec: ModelSpec, side: Side) -> list[Holding]:
    """Returns the layers, KV heads and blocks that each rank of the side's DP rank keeps of a sequence, in order of world
    ranks.

    Raises `ModelError` if the model has several attention kinds, or values of another size than keys.
    """
    if len(spec.kinds) > 1 or spec.value_dim is not None:
        raise ModelError(
            f"{spec.family}: handing off KV is not built yet for models whose layers have unlike heads, or values of another "
            f"size than keys (here {', '.join(map(_heads_text, spec.kinds))}): serve them from one pool, without tiers"
        )
    found = []
    for rank in range(side.layout.world):
        coords = coords_of(side.layout, rank)
        if coords.attn_dp == side.dp_rank:
            own, place = shard(spec, side.layout, coords), ContextRank.of(side.layout, coords, side.page_tokens)
            found.append(Holding(rank, own.layers, own.kv_heads, place.ownership()))
    return found


def _heads_text(kind: AttentionKind) -> str:
    return f"{kind.label}{kind.num_kv_heads} KV heads, keys of {kind.key_dim} and values of {kind.value_dim}"


def handoff(spec: ModelSpec, source: Side, destination: Side, positions: range) -> list[Copy]:
    """Returns the copies that transfer `positions` of a sequence, ordered by destination, then by layers and heads.

    Both layouts must have passed `placement.legality.check` for `spec`. For a chunk, use `Copy.within` on the map of the whole
    prompt, so that the assignment of senders does not change from chunk to chunk. Raises `ModelError` if the model has several
    attention kinds, or values of another size than keys.
    """
    replicas: dict[tuple[range, range, Ownership], list[int]] = {}
    for held in holdings(spec, source):
        replicas.setdefault((held.layers, held.kv_heads, held.ownership), []).append(held.world_rank)
    needed = holdings(spec, destination)
    copies = [
        Copy(rank, need.world_rank, layers, need.kv_heads, need.positions)
        for (layers, heads, ownership), ranks in replicas.items()
        for rank, need, layers in _split_layers(list(_needs(layers, heads, ownership, needed, positions)), ranks)
    ]
    return sorted(copies, key=lambda copy: (copy.destination, copy.layers.start, copy.kv_heads.start, copy.source))


def _needs(layers: range, heads: range, kept: Ownership, needed: Sequence[Holding], window: range) -> Iterator[_Need]:
    for held in needed:
        both = _overlap(layers, held.layers), _overlap(heads, held.kv_heads)
        need = _Need(held.world_rank, *both, shared(kept, held.ownership, window))
        if need.layers and need.weight:
            yield need


def _split_layers(needs: Sequence[_Need], ranks: Sequence[int]) -> Iterator[tuple[int, _Need, range]]:
    """Splits the layers of each need over `ranks`, which keep the same data; their loads are even to within one layer.

    A rank first takes layers for the destination with its own rank number, up to an even share; the rest fills the remaining
    room in order.
    """
    units = [(need, layer) for need in needs for layer in need.layers]
    total, loads, owner = sum(need.weight for need, _ in units), dict.fromkeys(ranks, 0), dict[int, int]()
    for index, (need, _) in enumerate(units):
        own = need.world_rank
        if own in loads and len(ranks) * (2 * loads[own] + need.weight) <= 2 * total:
            owner[index] = own
            loads[own] += need.weight
    rest = [index for index in range(len(units)) if index not in owner]
    room = list(accumulate(max(0, total - len(ranks) * load) for load in loads.values()))
    left, before = sum(units[index][0].weight for index in rest), 0
    for index in rest:
        weight = units[index][0].weight
        middle = (2 * before + weight) * room[-1]  # in the units of `room`, this is middle / (2 * left)
        owner[index] = ranks[bisect_right(room, middle // (2 * left))]
        before += weight
    yield from _joined(units, owner)


def _joined(units: Sequence[tuple[_Need, int]], owner: dict[int, int]) -> Iterator[tuple[int, _Need, range]]:
    """Yields (rank, need, layers), with neighbouring layers of one need from one rank joined to one range."""
    start = 0
    for index, (need, layer) in enumerate(units):
        following = units[index + 1][0] if index + 1 < len(units) else None
        if following is not need or owner[index + 1] != owner[index]:
            yield owner[index], need, range(units[start][1], layer + 1)
            start = index + 1


def _overlap(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))
