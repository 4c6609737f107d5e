"""Who hashes what: every chunk of every tensor once, by a rank that reads the tensor anyway, and evenly."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from placement.layout.layout import Layout
from placement.layout.mesh import coords_of
from placement.model.digest import CHUNK_BYTES, num_chunks
from placement.model.moe_spec import MoESpec
from placement.model.spec import ModelSpec
from placement.ownership.hash_shares import hash_shares
from placement.ownership.shards import parameters, shard
from tests.support.layout_draws import draw_layout
from tests.support.models.specs import DENSE

MOE = DENSE.model_copy(
    update={"moe": MoESpec(num_experts=12, top_k=2, expert_size=32, layers=(0, 1, 2, 3), normalise=True, form="each")}
)
SPECS = {"dense": DENSE, "tied": DENSE.model_copy(update={"tie_embeddings": True}), "experts": MOE}


def sources(spec: ModelSpec, layout: Layout, rank: int) -> set[str]:
    own = shard(spec, layout, coords_of(layout, rank))
    return {weight_slice.source for parameter in parameters(spec, own) for weight_slice in parameter.slices}


@pytest.mark.parametrize("name", SPECS)
def test_each_chunk_is_hashed_once_by_a_rank_that_loads_the_tensor(name: str) -> None:
    spec, draw = SPECS[name], random.Random(name)
    sizes = {source: draw.choice((0, 10, CHUNK_BYTES, 5 * CHUNK_BYTES + 1)) for source in sources(spec, Layout(), 0)}
    for _ in range(25):
        layout = draw_layout(draw, spec)
        shares = hash_shares(spec, layout, sizes)
        found = Counter((source, chunk) for share in shares for source, chunks in share.items() for chunk in chunks)
        assert found == Counter((source, chunk) for source, size in sizes.items() for chunk in range(num_chunks(size)))
        assert all(share.keys() <= sources(spec, layout, rank) for rank, share in enumerate(shares))


@pytest.mark.parametrize("layout", ["tp=2", "tp=3", "attn_dp=4", "cp=2,tp=2"])
def test_ranks_that_load_the_same_tensors_hash_equally_much(layout: str) -> None:
    sizes = {source: (1 + at % 5) * CHUNK_BYTES // 2 for at, source in enumerate(sorted(sources(DENSE, Layout(), 0)))}
    loads = [
        sum(min(CHUNK_BYTES, sizes[source] - chunk * CHUNK_BYTES) for source, chunks in share.items() for chunk in chunks)
        for share in hash_shares(DENSE, Layout.parse(layout), sizes)
    ]
    assert max(loads) - min(loads) <= CHUNK_BYTES


def test_a_tensor_without_a_size_is_named() -> None:
    sizes = dict.fromkeys(sources(DENSE, Layout(), 0), 10)
    del sizes["model.norm.weight"]
    with pytest.raises(KeyError, match=r"model\.norm\.weight"):
        hash_shares(DENSE, Layout(tp=2), sizes)
