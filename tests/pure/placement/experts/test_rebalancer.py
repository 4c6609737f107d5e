"""When experts move, and what it is said to bring."""

from __future__ import annotations

import pytest

from placement.experts.expert_map import ExpertMap, balancedness, initial
from placement.experts.moves import moves
from placement.experts.rebalancer import Costs, Rebalancer, Watch, predicted

LOAD = [[8.0, 8.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]
CHEAP = Costs(expert_s=0.010, expert_bytes=1000, bytes_per_s=1e6, steps=100)


def looks(policy: Rebalancer, evenness: list[float]) -> list[int]:
    """The steps after which a look is due."""
    watch, found = Watch(), []
    for step, even in enumerate(evenness, start=1):
        watch = policy.after_step(watch, even)
        if watch.due:
            found.append(step)
    return found


def test_a_look_every_interval() -> None:
    assert looks(Rebalancer(interval=20), [0.1] * 65) == [20, 40, 60]


def test_skew_calls_once_until_balance_has_come_back() -> None:
    policy = Rebalancer(interval=1000, skew=0.7, hysteresis=0.1)
    assert looks(policy, [0.9, 0.69, 0.5, 0.72, 0.69]) == [2]
    assert looks(policy, [0.9, 0.69, 0.5, 0.81, 0.69]) == [2, 5]
    assert looks(policy, [0.9, 0.7]) == []


def test_the_interval_runs_on_from_a_look_that_skew_called() -> None:
    assert looks(Rebalancer(interval=5, skew=0.7), [0.9, 0.6] + [0.6] * 8) == [2, 7]


def test_without_an_interval_only_skew_calls() -> None:
    assert looks(Rebalancer(interval=0), [0.1] * 5000) == []
    assert looks(Rebalancer(interval=0, skew=0.7), [0.9] * 4000 + [0.6] * 4000) == [4001]


def test_a_reason_is_given() -> None:
    policy = Rebalancer(interval=2, skew=0.5)
    assert policy.after_step(Watch(), 0.4).due == "balancedness 0.400 is below 0.5"
    assert policy.after_step(Watch(steps=1), 0.9).due == "2 steps since the last look"


def test_the_gain_by_hand() -> None:
    """Two ranks; layer 0 has 16 and 2, then 9 and 9; layer 1 two and two. One expert goes each way."""
    old = initial(2, 4, 2)
    new = ExpertMap(4, (2, 2), ((0, 2, 1, 3), (0, 1, 2, 3)))
    gain = predicted(old, new, moves(old, new), LOAD, CHEAP)
    assert (gain.before, gain.after) == (pytest.approx((9 / 16 + 1) / 2), 1.0)
    assert gain.saved_s == pytest.approx(0.010 * (1 - (9 + 2) / (16 + 2)))
    assert (gain.moved_bytes, gain.most_bytes, gain.move_s) == (2000, 1000, pytest.approx(0.001))
    assert gain.pays
    assert "balancedness 0.781 to 1.000" in str(gain)
    assert "2,000 bytes" in str(gain)


def test_experts_move_when_it_pays() -> None:
    decision = Rebalancer().decide(initial(2, 4, 2), LOAD, CHEAP)
    assert balancedness(decision.experts, LOAD) == [1.0, 1.0]
    assert [transfer.layer for transfer in decision.transfers] == [0, 0]


def test_experts_stay_when_the_move_costs_more_than_it_saves() -> None:
    old = initial(2, 4, 2)
    dear = Costs(expert_s=0.010, expert_bytes=10**9, bytes_per_s=1e6, steps=100)
    decision = Rebalancer().decide(old, LOAD, dear)
    assert (decision.experts, decision.transfers) == (old, ())
    assert not decision.gain.pays
    assert Rebalancer(must_pay=False).decide(old, LOAD, dear).transfers


def test_a_map_that_is_as_good_as_any_stays() -> None:
    even = [[1.0] * 4] * 2
    for load in (even, [[0.0] * 4] * 2):
        decision = Rebalancer(must_pay=False).decide(initial(2, 4, 2), load, CHEAP)
        assert (decision.experts, decision.transfers) == (initial(2, 4, 2), ())
