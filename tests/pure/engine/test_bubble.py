"""The bubble of a scripted pipeline, to the second."""

from __future__ import annotations

import pytest

from actors.engine.batching.bubble import BubbleMeter
from placement.cost.balance import bubble


def burst(meter: BubbleMeter, start: float, stages: int, micro_batches: int, reported: dict[int, float]) -> None:
    """`micro_batches` plans at once into stages that take a second each; results come back one a second once it is full."""
    meter.sent(start)
    for done in range(1, micro_batches + 1):
        now = start + stages - 1 + done
        # A stage s has worked since second s; it tells after each step, so it may have told of steps further on.
        busy = {stage: reported[stage] + min(micro_batches, stages - 1 + done - stage) for stage in range(stages)}
        meter.came_back(now, busy, micro_batches - done)
    reported.update(busy)


@pytest.mark.parametrize(("stages", "micro_batches", "expected"), [(2, 1, 0.5), (2, 4, 0.2), (2, 16, 1 / 17), (4, 32, 3 / 35)])
def test_fill_and_drain_are_the_bubble_and_time_without_work_is_not(stages: int, micro_batches: int, expected: float) -> None:
    meter, reported = BubbleMeter(stages), dict.fromkeys(range(stages), 0.0)
    assert meter.bubble() is None
    for repeat in range(3):
        burst(meter, 1000.0 * repeat, stages, micro_batches, reported)
        assert meter.bubble() == pytest.approx(bubble(stages, micro_batches)) == pytest.approx(expected)


def test_a_single_stage_has_none() -> None:
    meter = BubbleMeter(1)
    meter.sent(0.0)
    meter.came_back(5.0, {}, 0)
    assert meter.bubble() is None
    assert meter.wall_s == 5.0
