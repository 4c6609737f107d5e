"""The counter-based noise: reproducible, the same from any slice, and random enough to sample with."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actors.sampling.noise import _mix, gumbel, gumbel_of

torch.set_num_threads(1)

BINS = 64


def uniform(noise: Tensor) -> Tensor:
    """The u of -log(-log(u)), in fp64."""
    return (-(-noise.double()).exp()).exp()


def bins(noise: Tensor) -> Tensor:
    return (uniform(noise) * BINS).long().clamp_(0, BINS - 1)


def chi_square(observed: Tensor) -> float:
    """How many standard deviations the chi-square of counts, expected equal, is above its mean."""
    expected = observed.sum() / observed.numel()
    free = observed.numel() - 1
    return float((((observed - expected) ** 2 / expected).sum() - free) / math.sqrt(2 * free))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**20)), min_size=1, max_size=5),
    st.integers(0, 3000),
    st.integers(1, 3000),
)
def test_a_slice_of_rows_and_ids_has_the_values_of_the_whole(counters: list[tuple[int, int]], start: int, width: int) -> None:
    seeds, positions = [list(one) for one in zip(*counters, strict=True)]
    whole = gumbel(seeds, positions, range(6000))
    part = range(start, start + width)
    assert torch.equal(gumbel(seeds, positions, part), whole[:, part.start : part.stop])
    assert torch.equal(gumbel(seeds[-1:], positions[-1:], part)[0], whole[-1, part.start : part.stop])
    some = torch.randperm(6000)[:77].to(torch.int32).expand(len(seeds), -1)
    assert torch.equal(gumbel_of(seeds, positions, some), whole[:, some[0].long()])


def test_known_values_do_not_change_between_versions() -> None:
    found = gumbel([0, 2**63 + 5], [0, 1000], range(3))
    expected = torch.tensor([[3.0273051, 0.5728534, 0.666543], [-0.9409001, 0.0206473, 2.8360403]])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_mean_variance_and_range_are_those_of_gumbel() -> None:
    noise = gumbel(range(40), [7] * 40, range(50_000)).double()
    assert abs(noise.mean() - 0.5772157) < 0.004
    assert abs(noise.var() - math.pi**2 / 6) < 0.01
    assert -2.9 < noise.min() < -2.4
    assert 13.0 < noise.max() < 22.2
    assert noise.isfinite().all()


def test_large_values_keep_their_resolution() -> None:
    """The winners of a large vocabulary lie far right: there the values must still be distinct."""
    noise = gumbel(range(100), [0] * 100, range(50_000)).flatten()
    largest = noise.topk(1000).values
    assert largest.unique().numel() > 995
    for level in (8.0, 10.0):
        expected = noise.numel() * -math.expm1(-math.exp(-level))
        assert abs((noise > level).sum() - expected) < 5 * math.sqrt(expected)


AXES = {
    "ids": lambda: gumbel([3], [5], range(400_000))[0],
    "seeds": lambda: gumbel(range(20_000), [5] * 20_000, range(17, 37)).T.flatten(),
    "positions": lambda: gumbel([3] * 20_000, range(20_000), range(17, 37)).T.flatten(),
    "high_seeds": lambda: gumbel([s << 44 for s in range(20_000)], [5] * 20_000, range(17, 37)).T.flatten(),
    "high_ids": lambda: gumbel([9], [1], range(2**20, 2**20 + 400_000))[0],
}


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("apart", [1, 2, 8, 64, 256, 4096])
def test_values_are_uniform_and_neighbours_independent(axis: str, apart: int) -> None:
    found = bins(AXES[axis]())
    assert chi_square(torch.bincount(found, minlength=BINS).double()) < 5
    pairs = torch.bincount(found[:-apart] * BINS + found[apart:], minlength=BINS * BINS).double()
    assert abs(chi_square(pairs)) < 5


def test_rows_are_not_permutations_of_each_other() -> None:
    """Rows whose first keys differ in low bits only would hold the same values in another order, but for the second."""
    bits = _mix(torch.tensor([[0], [5]]).int(), torch.tensor([[1], [2]]).int(), torch.arange(1 << 16, dtype=torch.int32))
    assert torch.isin(bits[0], bits[1]).sum() < 50


def test_seed_and_position_are_not_interchangeable() -> None:
    assert not torch.equal(gumbel([1], [2], range(10)), gumbel([2], [1], range(10)))
    assert not torch.equal(gumbel([2**40], [2], range(10)), gumbel([2**41], [2], range(10)))
    assert torch.equal(gumbel([-1], [2], range(10)), gumbel([2**64 - 1], [2], range(10)))
