"""Expected traffic of expert-parallel (EP) dispatch in one layer, for a router that selects all experts with equal probability.

A token is sent once to every rank that holds at least one of its experts. If `top_k` of `E` experts are drawn uniformly, a rank
with ``E_r`` experts is a destination unless all are drawn from the other ranks, so the expected number of destinations is::

    u = sum over ranks of  1 - C(E - E_r, top_k) / C(E, top_k)

For 256 experts, 8 per token, on 8 ranks, u is 5.29 rows per token, not 8; on 32 ranks it is 7.27. Group-limited routing keeps a
token's experts together, so it reaches fewer ranks than this estimate. Skewed routing changes which ranks are reached, and
tends to lower their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np

from placement.experts.expert_map import ExpertMap


def destination_chances(num_experts: int, top_k: int, per_rank: Sequence[int]) -> list[float]:
    """Returns, for each rank, the probability that a token is sent to it, if the token selects `top_k` of `num_experts` experts
    uniformly.

    `per_rank` has the number of experts of each rank. No expert has copies; `chances_with_copies` is the general case.
    """
    whole = comb(num_experts, top_k)
    return [1 - comb(num_experts - own, top_k) / whole for own in per_rank]


def chances_with_copies(placed: ExpertMap, layer: int, top_k: int) -> list[float]:
    """Returns, for each rank, the probability that a token is sent to it in one layer of the expert map `placed`, with
    redundant experts.

    A token selects `top_k` experts uniformly. The copies of an expert are used round robin, and independently of those of
    another expert. A rank receives nothing if each of the token's experts uses a copy elsewhere. The probability of that is the
    mean, over all sets of `top_k` experts, of the product of their probabilities: an elementary symmetric polynomial divided by
    ``C(E, top_k)``.
    """
    missed = np.ones((placed.num_ranks, placed.num_experts))
    for expert, holders in enumerate(placed.holders[layer]):
        for slot in holders:
            missed[placed.rank_of(slot), expert] -= 1 / len(holders)
    sizes = np.arange(1, top_k + 1)
    means = np.zeros((placed.num_ranks, top_k + 1))
    means[:, 0] = 1
    # Means over all sets of the experts so far, by size of the set. Sums instead of means would overflow a float.
    for done, chance in enumerate(missed.T, start=1):
        with_it = sizes / done * chance[:, None] * means[:, :-1]
        means[:, 1:] = np.where(sizes <= done, (done - sizes) / done * means[:, 1:] + with_it, 0)
    return [1 - float(mean) for mean in means[:, top_k]]


def distinct_ranks(num_experts: int, top_k: int, ranks: int) -> float:
    """Returns the expected number of distinct ranks that a token is sent to if it selects `top_k` of `num_experts` experts
    uniformly, and the experts are split as evenly as possible over `ranks` ranks."""
    return sum(destination_chances(num_experts, top_k, [len(range(rank, num_experts, ranks)) for rank in range(ranks)]))


def rows_dispatched(own_tokens: Sequence[int], chances: Sequence[float]) -> list[float]:
    """Returns, for each rank, the expected number of rows (one per token and destination) that it sends to other ranks in one
    layer; the same number of result rows returns to it.

    `own_tokens` has the number of tokens that each rank contributes, `chances` the probability that a token is sent to each
    rank (`destination_chances`).
    """
    return [tokens * (sum(chances) - chances[rank]) for rank, tokens in enumerate(own_tokens)]


def rows_received(own_tokens: Sequence[int], chances: Sequence[float]) -> list[float]:
    """Returns, for each rank, the expected number of rows that it runs its experts on in one layer, including rows of its own
    tokens. `own_tokens` has the number of tokens that each rank contributes, `chances` the probability that a token is sent to
    each rank (`destination_chances`)."""
    return [sum(own_tokens) * chance for chance in chances]
