"""Partition by shares: exact, no part empty, and the even partition where the shares are equal."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.layout.partition import counts, partition, partition_balanced, partition_groups

quick = settings(deadline=None, max_examples=200)
share_lists = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6).map(tuple)


@pytest.mark.parametrize(
    ("total", "shares", "expected"),
    [
        (9, (5, 2, 1), [6, 2, 1]),
        (8, (3, 1), [6, 2]),
        (3, (3, 1), [2, 1]),
        (2, (1000, 1), [1, 1]),
        (10, (1, 1, 1), [4, 3, 3]),
        (64, (1.5, 0.5), [48, 16]),
        (7, (1, 100, 1), [1, 5, 1]),
        (3, (0.1, 0.1, 0.1), [1, 1, 1]),
    ],
)
def test_the_largest_remainders_get_what_is_left(total: int, shares: tuple[float, ...], expected: list[int]) -> None:
    assert counts(total, len(shares), shares) == expected


@quick
@given(share_lists, st.integers(0, 60))
def test_every_part_is_near_its_quota_and_none_is_empty(shares: tuple[float, ...], more: int) -> None:
    total = len(shares) + more
    found = counts(total, len(shares), shares)
    assert sum(found) == total
    quotas = [total * Fraction(share) / sum(map(Fraction, shares)) for share in shares]
    if all(quota >= 1 for quota in quotas):
        assert all(abs(count - quota) < 1 for count, quota in zip(found, quotas, strict=True))
    assert min(found) >= 1
    by_share = sorted(range(len(shares)), key=lambda part: shares[part])
    assert [found[part] for part in by_share] == sorted(found) or len(set(shares)) < len(shares)


@quick
@given(st.integers(1, 6), st.integers(0, 40), st.floats(0.1, 9))
def test_equal_shares_are_the_even_partition(parts: int, more: int, share: float) -> None:
    assert partition(parts + more, parts, (share,) * parts) == partition(parts + more, parts)


@quick
@given(st.integers(1, 5), st.integers(1, 4), st.data(), st.floats(0.1, 9))
def test_equal_shares_partition_groups_as_no_shares_do(group_size: int, groups: int, data: st.DataObject, share: float) -> None:
    parts = data.draw(st.integers(groups, groups * group_size))
    assert partition_groups(group_size, groups, parts, (share,) * parts) == partition_groups(group_size, groups, parts)


@quick
@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_every_group_has_parts_and_every_part_an_item(group_size: int, groups: int, data: st.DataObject) -> None:
    parts = data.draw(st.integers(groups, groups * group_size))
    shares = tuple(data.draw(st.lists(st.floats(1e-3, 1e3), min_size=parts, max_size=parts)))
    runs = partition_groups(group_size, groups, parts, shares)
    assert [part for run in runs for part in run] == list(range(parts))
    assert all(1 <= len(run) <= group_size for run in runs)


def test_a_part_with_a_large_share_has_a_group_to_itself() -> None:
    assert partition_groups(3, 2, 3, (5.0, 2.0, 1.0)) == (range(0, 1), range(1, 3))
    assert partition_groups(3, 2, 3, (1.0, 2.0, 5.0)) == (range(0, 2), range(2, 3))


@quick
@given(share_lists, st.integers(0, 80), st.data())
def test_a_balanced_partition_brings_loads_for_their_share_within_one_block(
    shares: tuple[float, ...], more: int, data: st.DataObject
) -> None:
    already = [data.draw(st.integers(0, 500)) for _ in shares]
    found = partition_balanced(len(shares) + more, 2, already, 10, shares)
    assert [row for part in found for row in part] == list(range(2 * (len(shares) + more)))
    loads = [
        Fraction(have + 10 * len(part)) / Fraction(share) for have, part, share in zip(already, found, shares, strict=True)
    ]
    # Whoever got more than its first block held least at that moment, so without its last one it is no further than anyone.
    for part, share, load in zip(found, shares, loads, strict=True):
        assert len(part) == 2 or load - Fraction(20) / Fraction(share) <= min(loads)
