"""Partition of a sequence of items (layers, heads, columns) into contiguous parts: exact, and the same on every rank.

The parts are even, or in proportion to given shares::

    9 items, 3 parts               3 3 3
    9 items, shares 5 : 2 : 1      6 2 1        quotas 5.6 2.3 1.1: the floors, then one each to the largest remainders

Shares are converted to exact fractions, so that rounding never decides which part gets an item.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache, lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from math import lcm

Shares = tuple[float, ...] | None
"""Relative size of each part, in any unit; None: all parts are equal."""


def partition(total: int, parts: int, shares: Shares = None) -> list[range]:
    """Returns `parts` contiguous ranges that split ``range(total)``. They are even, or in proportion to `shares`; their lengths
    are those of `counts`."""
    return ranges(counts(total, parts, shares))


def counts(total: int, parts: int, shares: Shares = None) -> list[int]:
    """Returns the number of items of each of `parts` parts, `total` in all: its quota rounded down, or up for the largest
    remainders (on a tie, the lower part).

    Without `shares` the quotas are equal, and parts may be empty. With `shares` (one per part) they are in proportion, and
    every part gets at least one item (`total` must be at least `parts`): parts with quotas below one get one, and the quotas
    of the others are taken from the rest.
    """
    if shares is None:
        return [total // parts + (part < total % parts) for part in range(parts)]
    return _largest_remainder(total, [Fraction(share) for share in shares])


def partition_balanced(blocks: int, block: int, already: Sequence[int], each: int, shares: Shares = None) -> list[range]:
    """Returns contiguous ranges, one per part, that split ``blocks * block`` items by a greedy assignment of blocks of `block`
    items.

    `already` is the weight that each part holds before, which sets the number of parts (at most `blocks`); `each` is the weight
    of one item. Every part first gets one block. Each further block goes to the part with the least weight relative to its
    share (None: equal shares), the lowest on a tie.
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
    """Returns, for each of `groups` groups of `group_size` items, the run of neighbouring parts that share it, as a range of
    part indices.

    There are at least as many parts as groups. The parts of a run split the items of their group, so no run is longer than
    `group_size`. Without shares the lengths of the runs differ by at most one. With shares (one per part) the runs bring the
    parts nearest to their quotas (least squares); among equals, the most even runs are chosen.
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
        """Returns the cost of splitting `left` groups over the parts from `start` on, and the lengths of the runs."""
        longest, shortest = min(group_size, parts - start - (left - 1)), max(1, parts - start - (left - 1) * group_size)
        options = []
        for length in range(longest, shortest - 1, -1) if left > 1 else [parts - start]:
            misses, evenness = cost(range(start, start + length))
            rest = best(start + length, left - 1) if left > 1 else (Fraction(0), 0, ())
            options.append((misses + rest[0], evenness + rest[1], (length, *rest[2])))
        return min(options, key=lambda option: option[:2])

    return tuple(ranges(best(0, groups)[2]))


def ranges(lengths: Sequence[int]) -> list[range]:
    """Returns contiguous ranges of the given lengths, the first starting at 0."""
    return [range(start, stop) for start, stop in pairwise(accumulate(lengths, initial=0))]


def _largest_remainder(total: int, shares: Sequence[Fraction]) -> list[int]:
    """Applies Hamilton's method to the parts whose quota is at least one; every other part gets one item beforehand."""
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
    """Returns integers in proportion to ``1 / share``, so that loads relative to shares can be compared exactly."""
    fractions = [Fraction(share) for share in shares]
    multiple = lcm(*(fraction.numerator for fraction in fractions))
    return [fraction.denominator * (multiple // fraction.numerator) for fraction in fractions]
