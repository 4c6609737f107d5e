"""DP ranks in one scheduler: where a sequence starts, and that it stays there."""

from __future__ import annotations

import random

from actors.wire.plans import StepPlan
from actors.wire.requests import SamplingParams
from tests.pure.engine.test_scheduler import Bench, config, request

PREFIX = list(range(16))


def dp_ranks_of(plan: StepPlan | None) -> list[int]:
    """Of the sequences a plan starts, in the order in which they were placed."""
    assert plan is not None
    return [start.dp_rank for start in sorted(plan.started, key=lambda start: start.sequence_id)]


def bench_of(dp_size: int, **changes: int) -> Bench:
    return Bench(config(**{"dp_size": dp_size, "num_blocks": 40, "max_batch_tokens": 64, "max_sequences": 8, **changes}))


def test_requests_spread_over_dp_ranks_by_what_is_held_there() -> None:
    bench = bench_of(3)
    bench.add(request("long", [1] * 30, 8), *(request(str(number), [2, number] * 4, 8) for number in range(6)))
    # 8 blocks in the first DP rank; then 2 blocks a request, always where least is held.
    assert dp_ranks_of(bench.step()) == [0, 1, 2, 1, 2, 1, 2]
    bench.drain()
    bench.check_outputs()


def test_a_cached_front_draws_a_sequence_until_others_hold_more_than_it_is_long() -> None:
    bench = bench_of(2)
    bench.add(request("first", [*PREFIX, 99], 1))
    bench.drain()
    bench.add(*(request(str(number), [*PREFIX, number, number, number, number], 30) for number in range(7)))
    # Four blocks are cached, and each request holds one of its own: the fifth would meet four of others there, a tie. What it
    # computes elsewhere cannot be found in this step yet.
    assert dp_ranks_of(bench.step()) == [0, 0, 0, 0, 1, 0, 0]
    bench.drain()
    bench.check_outputs()


def test_a_dp_rank_without_room_is_passed_over_for_one_with() -> None:
    bench = bench_of(2, num_blocks=10)
    bench.add(request("cached", [*PREFIX, 99], 1))
    bench.drain()
    bench.add(request("filler", [5] * 3, 40))
    bench.step()
    other = bench.scheduler.running[0].dp_rank
    bench.add(request("fits only elsewhere", [*PREFIX, *range(40, 60)], 2))
    assert dp_ranks_of(bench.step()) == [1 - other]
    bench.drain()
    bench.check_outputs()


def test_each_dp_rank_has_the_whole_budget_of_a_step() -> None:
    bench = bench_of(4, max_batch_tokens=8, max_sequences=1)
    bench.add(*(request(str(number), [number] * 8, 2) for number in range(5)))
    plan = bench.step()
    assert [[row.count for row in plan.of_dp_rank(dp_rank).rows] for dp_rank in range(4)] == [[8]] * 4
    assert bench.scheduler.waiting.num_requests == 1
    bench.drain()
    bench.check_outputs()


def test_blocks_that_run_out_in_one_dp_rank_preempt_there_only() -> None:
    bench = bench_of(2, num_blocks=6)
    bench.add(*(request(str(number), [number] * 7, 14 if number % 2 else 1) for number in range(2)))
    bench.add(request("a", [7] * 6, 17), request("b", [8] * 6, 17))
    calm = bench.scheduler.dp_ranks[0]
    while not bench.scheduler.counts.preemptions:
        bench.step()
        running = {sequence.request.request_id for sequence in calm.running}
    assert {sequence.request.request_id for sequence in calm.running} == running, "nobody left the other DP rank"
    bench.drain()
    bench.check_outputs()


def test_five_hundred_requests_over_four_dp_ranks_with_aborts() -> None:
    rng = random.Random(5)
    bench = Bench(config(dp_size=4, num_blocks=12, max_batch_tokens=24, max_sequences=5, stages=2), depth=3)
    for number in range(500):
        prompt = PREFIX[: rng.choice([0, 0, 8, 16])] + [rng.randrange(50) for _ in range(rng.randint(1, 20))]
        sampling = SamplingParams(prompt_logprobs=rng.choice([None, None, 0]))
        bench.add(request(str(number), prompt, rng.randint(0, 20), sampling=sampling, tenant=rng.choice("ab")))
        if rng.random() < 0.2:
            bench.cancel(str(rng.randint(0, number)))
        if rng.random() < 0.7:
            bench.step()
    bench.drain()
    bench.check_outputs()
    assert bench.scheduler.counts.preemptions > 0
    assert {start.dp_rank for plan in bench.rank.plans for start in plan.started} == {0, 1, 2, 3}
