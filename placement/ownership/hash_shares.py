"""Which rank hashes which chunks of the checkpoint's tensors, for the model digest (`placement.model.digest`).

A tensor is hashed by the ranks that load a slice of it, so that its bytes are read on a machine that reads them anyway, and
each chunk by one rank only, the one that has the fewest bytes to hash so far.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from placement.layout.layout import Layout
from placement.layout.mesh import coords_of
from placement.model.digest import CHUNK_BYTES, num_chunks
from placement.model.spec import ModelSpec
from placement.ownership.shards import parameters, shard


def hash_shares(spec: ModelSpec, layout: Layout, num_bytes: Mapping[str, int]) -> list[dict[str, list[int]]]:
    """Returns, for each world rank, the chunks of tensors that it hashes: chunk numbers by the tensor's Hugging Face name.

    `num_bytes` is the size of each tensor of the checkpoint. Together the ranks hash every chunk of every tensor that one of
    them loads, each chunk once. Raises `KeyError` if a tensor has no size.
    """
    shares: list[dict[str, list[int]]] = [{} for _ in range(layout.world)]
    load = [0] * layout.world
    for name, holders in sorted(_holders(spec, layout).items()):
        left = num_bytes[name]
        for chunk in range(num_chunks(left)):
            rank = min(holders, key=load.__getitem__)
            load[rank] += min(left - chunk * CHUNK_BYTES, CHUNK_BYTES)
            shares[rank].setdefault(name, []).append(chunk)
    return shares


def _holders(spec: ModelSpec, layout: Layout) -> dict[str, list[int]]:
    """Returns the world ranks that load a slice of each tensor, by the tensor's name."""
    holders: dict[str, dict[int, None]] = defaultdict(dict)
    for rank in range(layout.world):
        for parameter in parameters(spec, shard(spec, layout, coords_of(layout, rank))):
            for weight_slice in parameter.slices:
                holders[weight_slice.source][rank] = None
    return {name: list(ranks) for name, ranks in holders.items()}
