"""How plans are cut so that every stage has one, and what may be planned ahead of results."""

from __future__ import annotations

import pytest

from actors.engine.batching.micro_batches import num_micro_batches, prompt_tokens
from actors.engine.config.engine_config import EngineConfig
from actors.engine.link.scripted import ScriptedRank, continuation
from actors.engine.scheduler import Scheduler
from actors.engine.sequences.sequence import Sequence
from actors.wire.plans import StepPlan
from actors.wire.requests import GenerateRequest, SamplingParams, TokenEvent

VOCAB = 50


class Ahead:
    """A scheduler whose results are given back one by one, by hand."""

    def __init__(self, **changes: int) -> None:
        self.config = EngineConfig(**{"num_blocks": 200, "block_size": 4, "max_model_len": 400, **changes})
        self.scheduler, self.rank = Scheduler(self.config), ScriptedRank(200, 4, VOCAB)
        self.results = []
        self.count = 0

    def add(self, prompt: list[int], max_tokens: int, **sampling: object) -> None:
        request = GenerateRequest(
            request_id=str(self.count), prompt=prompt, max_tokens=max_tokens, sampling=SamplingParams(**sampling)
        )
        self.scheduler.add(Sequence.of(request, 4, 0.0, self.count))
        self.count += 1

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.schedule(0.0)
        if plan is not None:
            self.results.append(self.rank.run(plan))
        return plan

    def rows(self) -> list[tuple[int, int]]:
        """(sequence, count) of the rows of the next plan."""
        plan = self.plan()
        return [] if plan is None else [(row.sequence_id, row.count) for row in plan.rows]

    def back(self) -> list[TokenEvent]:
        return self.scheduler.update(self.results.pop(0))


@pytest.mark.parametrize(
    ("decoding", "stages", "parts"),
    [(0, 2, 1), (1, 2, 1), (7, 2, 1), (8, 2, 2), (100, 2, 2), (11, 4, 2), (12, 4, 3), (99, 1, 1)],
)
def test_no_micro_batch_is_too_small_to_pay(decoding: int, stages: int, parts: int) -> None:
    assert num_micro_batches(decoding, stages, 4) == parts


def test_a_decode_runs_one_step_ahead_of_what_the_engine_knows() -> None:
    bench = Ahead(plans_in_flight=3)
    bench.add([1, 2, 3], 10)
    first, second = bench.plan(), bench.plan()
    assert (first.rows[0].sample, first.rows[0].append_sampled) == (True, False)
    assert (second.rows[0].start, second.rows[0].append, second.rows[0].append_sampled) == (3, [], True)
    assert bench.plan() is None, "two of its tokens are unknown"
    bench.back()
    third = bench.plan()
    assert (third.settled, third.rows[0].append, third.rows[0].append_sampled) == (0, [], True)
    bench.back()
    bench.back()
    fourth = bench.plan()
    assert (fourth.settled, len(fourth.rows[0].append), fourth.rows[0].append_sampled) == (2, 1, False)


def test_what_will_be_the_last_token_is_not_run() -> None:
    bench = Ahead(plans_in_flight=2)
    bench.add([1, 2, 3], 2)
    assert [bench.rows(), bench.rows(), bench.rows()] == [[(0, 3)], [(0, 1)], []]
    assert [event.finish for _ in range(2) for event in bench.back()] == [None, "length"]


def test_a_token_past_a_stop_is_dropped_and_its_block_comes_back() -> None:
    stop = continuation([1, 2, 3], 2, VOCAB)[1]
    bench = Ahead(plans_in_flight=2)
    bench.add([1, 2, 3], 50, stop_token_ids=(stop,))
    bench.plan()
    bench.plan()  # samples the stop
    bench.back()
    past = bench.plan()
    assert len(past.rows[0].new_blocks) == 1
    [event] = bench.back()
    assert (event.tokens, event.finish) == ([stop], "stop")
    assert bench.scheduler.dp_ranks[0].pool.num_available == 200
    assert bench.back() == []
    assert bench.scheduler.counts.tokens_discarded == 1
    assert bench.scheduler.counts.tokens_sampled == 2


def test_decodes_take_turns_in_two_halves() -> None:
    bench = Ahead(stages=2)
    for start in range(8):
        bench.add([start], 20)
    bench.rows()
    bench.back()
    turns = [bench.rows() for _ in range(3)]
    assert [{sequence for sequence, _ in turn} for turn in turns] == [{0, 1, 2, 3}, {4, 5, 6, 7}, {0, 1, 2, 3}]
    bench.back()
    assert {sequence for sequence, _ in bench.rows()} == {4, 5, 6, 7}


def test_few_decodes_stay_together() -> None:
    bench = Ahead(stages=2)
    for start in range(7):
        bench.add([start], 20)
    bench.rows()
    bench.back()
    assert [len(bench.rows()), len(bench.rows()), len(bench.rows())] == [7, 7, 0]


def test_chunks_of_one_prompt_follow_each_other_without_a_result() -> None:
    bench = Ahead(stages=2, micro_batch_tokens=8)
    bench.add(list(range(30)), 3)
    assert [bench.rows() for _ in range(6)] == [[(0, 8)], [(0, 8)], [(0, 8)], [(0, 6)], [(0, 1)], []]


def test_prompts_are_cut_for_stages_only() -> None:
    assert prompt_tokens(10_000, 1, 128) is None
    assert prompt_tokens(10_000, 2, 128) == 1250
    assert prompt_tokens(300, 4, 128) == 128
