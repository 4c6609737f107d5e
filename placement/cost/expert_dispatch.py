"""What the experts of one layer cost on the wire, before any token was routed: for a router that favours nobody.

A token goes once to every rank that holds one of its experts, however many of them that rank holds. With `top_k` of `E` experts
drawn without favour, a rank of ``E_r`` experts is among the destinations unless all are drawn from the others::

    u = sum over ranks of  1 - C(E - E_r, top_k) / C(E, top_k)

256 experts, 8 a token, on 8 ranks: u = 5.29 rows a token, not 8; on 32 ranks 7.27. Group-limited routing keeps a token's
experts together, so it reaches fewer ranks than this says; skew changes which ranks, and rather lowers the number.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np

from placement.experts.expert_map import ExpertMap


def destination_chances(num_experts: int, top_k: int, per_rank: Sequence[int]) -> list[float]:
    """Of each rank, how likely a token goes there, when it holds that many of the experts and nobody else does."""
    whole = comb(num_experts, top_k)
    return [1 - comb(num_experts - own, top_k) / whole for own in per_rank]


def chances_with_copies(placed: ExpertMap, layer: int, top_k: int) -> list[float]:
    """The same under a map. The copies of an expert are used round robin; those of two experts count as chosen independently.

    A rank is missed when each of the token's experts misses it: the product of their chances, in the mean over all sets of
    `top_k` experts, which is an elementary symmetric polynomial over ``C(E, top_k)``.
    """
    missed = np.ones((placed.num_ranks, placed.num_experts))
    for expert, holders in enumerate(placed.holders[layer]):
        for slot in holders:
            missed[placed.rank_of(slot), expert] -= 1 / len(holders)
    sizes = np.arange(1, top_k + 1)
    means = np.zeros((placed.num_ranks, top_k + 1))
    means[:, 0] = 1
    # Means over the sets of the experts so far, by size of the set: sums over so many sets would be too large for a float.
    for done, chance in enumerate(missed.T, start=1):
        with_it = sizes / done * chance[:, None] * means[:, :-1]
        means[:, 1:] = np.where(sizes <= done, (done - sizes) / done * means[:, 1:] + with_it, 0)
    return [1 - float(mean) for mean in means[:, top_k]]


def distinct_ranks(num_experts: int, top_k: int, ranks: int) -> float:
    """Expected number of ranks a token goes to, `u` above; experts are split as evenly as they can be."""
    return sum(destination_chances(num_experts, top_k, [len(range(rank, num_experts, ranks)) for rank in range(ranks)]))


def rows_dispatched(own_tokens: Sequence[int], chances: Sequence[float]) -> list[float]:
    """Expected rows each rank sends to other ranks for one layer; as many come back. `own_tokens` are those of each rank."""
    return [tokens * (sum(chances) - chances[rank]) for rank, tokens in enumerate(own_tokens)]


def rows_received(own_tokens: Sequence[int], chances: Sequence[float]) -> list[float]:
    """Expected rows each rank runs its experts on, its own tokens' among them."""
    return [sum(own_tokens) * chance for chance in chances]
