"""Dealing a row of things to hands: contiguous, exact, the same on every rank.

Evenly, or by shares (how much each hand is to carry, in any unit)::

    9 things, 3 hands               3 3 3
    9 things, shares 5 : 2 : 1      6 2 1        quotas 5.6 2.3 1.1: the whole parts, then one each to the largest remainders

Shares are turned into exact fractions, so no rounding decides who gets a thing.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache, lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from math import lcm

Shares = tuple[float, ...] | None
"""What each hand is to carry, in proportion; None: all the same."""


def deal(total: int, hands: int, shares: Shares = None) -> list[range]:
    """Contiguous ranges that cover ``range(total)``: the counts of `counts`, in order."""
    return ranges(counts(total, hands, shares))


def counts(total: int, hands: int, shares: Shares = None) -> list[int]:
    """How many of `total` things each hand gets: its quota rounded down, or up; lower hands first among equals.

    With shares no hand is left without (there must be a thing for each): where a quota is below one the hand gets one,
    and the others share what is left.
    """
    if shares is None:
        return [total // hands + (hand < total % hands) for hand in range(hands)]
    return _largest_remainder(total, [Fraction(share) for share in shares])


def level(blocks: int, block: int, already: Sequence[int], each: int, shares: Shares = None) -> list[range]:
    """Deal `blocks` blocks one by one to the hand that holds least for its share, the lowest on a tie.

    `already`: weight a hand holds; `each`: weight of one of the `block` things in a block. Every hand gets one block
    first, however much it holds.
    """
    scale = _inverses(shares or [1.0] * len(already))
    hands = [block] * len(already)
    held = [((weight + block * each) * scale[hand], hand) for hand, weight in enumerate(already)]
    heapify(held)
    for _ in range(blocks - len(hands)):
        load, poorest = held[0]
        hands[poorest] += block
        heapreplace(held, (load + block * each * scale[poorest], poorest))
    return ranges(hands)


@lru_cache(maxsize=64)
def split_hands(per_pile: int, piles: int, hands: int, shares: Shares = None) -> tuple[range, ...]:
    """Which hands draw from each of `piles` piles of `per_pile` things, when there are more hands than piles.

    Runs of neighbouring hands, one run a pile, none longer than the pile. Without shares their lengths differ by at most
    one. With shares it is the split that brings every hand nearest to its quota (least squares), then the most even one.
    """
    if shares is None:
        return tuple(deal(hands, piles))
    parts = [Fraction(share) for share in shares]
    whole = sum(parts)
    quotas = [piles * per_pile * part / whole for part in parts]

    @cache
    def cost(run: range) -> tuple[Fraction, int]:
        found = _largest_remainder(per_pile, parts[run.start : run.stop])
        misses = ((count - quotas[hand]) ** 2 for count, hand in zip(found, run, strict=True))
        return sum(misses, Fraction(0)), len(run) ** 2

    @cache
    def best(start: int, left: int) -> tuple[Fraction, int, tuple[int, ...]]:
        """Cost of the hands from `start` on over `left` piles, and the lengths of their runs."""
        longest, shortest = min(per_pile, hands - start - (left - 1)), max(1, hands - start - (left - 1) * per_pile)
        options = []
        for length in range(longest, shortest - 1, -1) if left > 1 else [hands - start]:
            misses, evenness = cost(range(start, start + length))
            rest = best(start + length, left - 1) if left > 1 else (Fraction(0), 0, ())
            options.append((misses + rest[0], evenness + rest[1], (length, *rest[2])))
        return min(options, key=lambda option: option[:2])

    return tuple(ranges(best(0, piles)[2]))


def ranges(lengths: Sequence[int]) -> list[range]:
    """Contiguous ranges of the given lengths, from 0."""
    return [range(start, stop) for start, stop in pairwise(accumulate(lengths, initial=0))]


def _largest_remainder(total: int, shares: Sequence[Fraction]) -> list[int]:
    """Hamilton's method over the hands whose quota is at least one; the others get one each, and are out of the sum."""
    poor: set[int] = set()
    while True:
        rich = [hand for hand in range(len(shares)) if hand not in poor]
        left, whole = total - len(poor), sum(shares[hand] for hand in rich)
        quotas = {hand: left * shares[hand] / whole for hand in rich}
        below = {hand for hand in rich if quotas[hand] < 1}
        if not below:
            break
        poor |= below
    found = [1 if hand in poor else int(quotas[hand]) for hand in range(len(shares))]
    by_remainder = sorted(rich, key=lambda hand: (int(quotas[hand]) - quotas[hand], hand))
    for hand in by_remainder[: total - sum(found)]:
        found[hand] += 1
    return found


def _inverses(shares: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to 1/share: loads times these compare like loads for their share, and exactly."""
    parts = [Fraction(share) for share in shares]
    multiple = lcm(*(part.numerator for part in parts))
    return [part.denominator * (multiple // part.numerator) for part in parts]
