"""Models and brute force for the hand-off map: what each rank must get, token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from placement.layout import mesh
from placement.model.mla_spec import MLASpec
from placement.model.spec import ModelSpec
from placement.ownership import shards
from placement.ownership.context import ContextRank
from placement.ownership.handoff import Copy, Side

Unit = tuple[int, int, int, int]
"""(rank, layer, KV head, position)."""


def heads_model(kv_heads: int, queries_per_kv: int = 2, layers: int = 4, head_dim: int = 8) -> ModelSpec:
    """A dense model with `kv_heads` KV heads, and columns and vocabulary enough for any small layout."""
    return ModelSpec(
        family="llama",
        hidden_size=64,
        num_layers=layers,
        num_heads=kv_heads * queries_per_kv,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=96,
        vocab_size=101,
        max_position=512,
        norm_eps=1e-5,
        windows=(None,) * layers,
        dtype="float32",
    )


def latent_model(heads: int = 6, layers: int = 4, rank: int = 16, rope: int = 4) -> ModelSpec:
    """The same with latent attention."""
    mla = MLASpec(kv_lora_rank=rank, nope_dim=8, rope_dim=rope, value_dim=6)
    latent = {"num_heads": heads, "num_kv_heads": 1, "head_dim": mla.query_dim, "mla": mla}
    return ModelSpec.model_validate({**heads_model(1, layers=layers).model_dump(), **latent})


def kept(spec: ModelSpec, side: Side, tokens: int) -> set[Unit]:
    """What the ranks of the side's DP rank keep of `tokens` tokens, asked of the shards and of every single position."""
    found = set()
    for rank in range(side.layout.world):
        coords = mesh.coords_of(side.layout, rank)
        own, ownership = (
            shards.shard(spec, side.layout, coords),
            ContextRank.of(side.layout, coords, side.page_tokens).ownership(),
        )
        blocks = ownership.blocks(list(range(-(-tokens // side.page_tokens))))
        mine = [position for position in range(tokens) if ownership.slot(position, blocks) >= 0]
        if coords.attn_dp == side.dp_rank:
            found |= {(rank, layer, head, p) for layer in own.layers for head in own.kv_heads for p in mine}
    return found


def moved(copies: Iterable[Copy], end: str) -> Counter[Unit]:
    """What copies send (end ``source``) or deliver (``destination``)."""
    return Counter(
        (getattr(copy, end), layer, head, position)
        for copy in copies
        for layer in copy.layers
        for head in copy.kv_heads
        for span in copy.positions.spans()
        for position in span
    )
