"""Partition a row of items: contiguous, exact, the same on every rank.

Evenly, or by shares (how much each part is to carry, in any unit)::

    9 items, 3 parts               3 3 3
    9 items, shares 5 : 2 : 1      6 2 1        quotas 5.6 2.3 1.1: the floors, then one each to the largest remainders

Shares are turned into exact fractions, so no rounding decides who gets an item.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache, lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from math import lcm

Shares = tuple[float, ...] | None
"""What each part is to carry, in proportion; None: all the same."""


def partition(total: int, parts: int, shares: Shares = None) -> list[range]:
    """Contiguous ranges that cover ``range(total)``: the counts of `counts`, in order."""
    return ranges(counts(total, parts, shares))


def counts(total: int, parts: int, shares: Shares = None) -> list[int]:
    """How many of `total` items each part gets: its quota rounded down, or up; lower parts first among equals.

    With shares no part is left without (there must be an item for each): where a quota is below one the part gets one,
    and the others share what is left.
    """
    if shares is None:
        return [total // parts + (part < total % parts) for part in range(parts)]
    return _largest_remainder(total, [Fraction(share) for share in shares])


def partition_balanced(blocks: int, block: int, already: Sequence[int], each: int, shares: Shares = None) -> list[range]:
    """Assign `blocks` blocks one by one to the part that holds least for its share, the lowest on a tie.

    `already`: weight a part holds; `each`: weight of one of the `block` items in a block. Every part gets one block
    first, however much it holds.
    """
    scale = _inverses(shares or [1.0] * len(already))
    parts = [block] * len(already)
    held = [((weight + block * each) * scale[part], part) for part, weight in enumerate(already)]
    heapify(held)
    for _ in range(blocks - len(parts)):
        load, smallest = held[0]
        parts[smallest] += block
        heapreplace(held, (load + block * each * scale[smallest], smallest))
    return ranges(parts)


@lru_cache(maxsize=64)
def partition_groups(group_size: int, groups: int, parts: int, shares: Shares = None) -> tuple[range, ...]:
    """Which parts split each of `groups` groups of `group_size` items, when there are more parts than groups.

    Runs of neighbouring parts, one run a group, none longer than the group. Without shares their lengths differ by at most
    one. With shares it is the split that brings every part nearest to its quota (least squares), then the most even one.
    """
    if shares is None:
        return tuple(partition(parts, groups))
    fractions = [Fraction(share) for share in shares]
    whole = sum(fractions)
    quotas = [groups * group_size * fraction / whole for fraction in fractions]

    @cache
    def cost(run: range) -> tuple[Fraction, int]:
        found = _largest_remainder(group_size, fractions[run.start : run.stop])
        misses = ((count - quotas[part]) ** 2 for count, part in zip(found, run, strict=True))
        return sum(misses, Fraction(0)), len(run) ** 2

    @cache
    def best(start: int, left: int) -> tuple[Fraction, int, tuple[int, ...]]:
        """Cost of the parts from `start` on over `left` groups, and the lengths of their runs."""
        longest, shortest = min(group_size, parts - start - (left - 1)), max(1, parts - start - (left - 1) * group_size)
        options = []
        for length in range(longest, shortest - 1, -1) if left > 1 else [parts - start]:
            misses, evenness = cost(range(start, start + length))
            rest = best(start + length, left - 1) if left > 1 else (Fraction(0), 0, ())
            options.append((misses + rest[0], evenness + rest[1], (length, *rest[2])))
        return min(options, key=lambda option: option[:2])

    return tuple(ranges(best(0, groups)[2]))


def ranges(lengths: Sequence[int]) -> list[range]:
    """Contiguous ranges of the given lengths, from 0."""
    return [range(start, stop) for start, stop in pairwise(accumulate(lengths, initial=0))]


def _largest_remainder(total: int, shares: Sequence[Fraction]) -> list[int]:
    """Hamilton's method over the parts whose quota is at least one; the others get one each, and are out of the sum."""
    minimal: set[int] = set()
    while True:
        remaining = [part for part in range(len(shares)) if part not in minimal]
        left, whole = total - len(minimal), sum(shares[part] for part in remaining)
        quotas = {part: left * shares[part] / whole for part in remaining}
        below = {part for part in remaining if quotas[part] < 1}
        if not below:
            break
        minimal |= below
    found = [1 if part in minimal else int(quotas[part]) for part in range(len(shares))]
    by_remainder = sorted(remaining, key=lambda part: (int(quotas[part]) - quotas[part], part))
    for part in by_remainder[: total - sum(found)]:
        found[part] += 1
    return found


def _inverses(shares: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to 1/share: loads times these compare like loads for their share, and exactly."""
    fractions = [Fraction(share) for share in shares]
    multiple = lcm(*(fraction.numerator for fraction in fractions))
    return [fraction.denominator * (multiple // fraction.numerator) for fraction in fractions]
