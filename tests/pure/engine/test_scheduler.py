"""The scheduler against scripted ranks that check every plan."""

import itertools
from collections import defaultdict, deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from actors.engine.admission import InvalidRequest, PromptTooLong, check_request
from actors.engine.config.engine_config import EngineConfig
from actors.engine.link.scripted import ScriptedRank, continuation, prompt_logprobs
from actors.engine.scheduler import Scheduler
from actors.engine.sequences.sequence import Sequence
from actors.engine.sequences.token_events import ResultMismatch
from actors.wire.plans import StepPlan
from actors.wire.requests import GenerateRequest, SamplingParams, TokenEvent
from actors.wire.results import StepResult

VOCAB = 50


def config(**changes: Any) -> EngineConfig:
    values = {"num_blocks": 16, "block_size": 4, "max_model_len": 60, "max_batch_tokens": 16, "max_sequences": 4}
    return EngineConfig(**{**values, **changes})


def request(request_id: str, prompt: list[int], max_tokens: int = 4, **changes: Any) -> GenerateRequest:
    return GenerateRequest(request_id=request_id, prompt=prompt, max_tokens=max_tokens, **changes)


class Bench:
    """A scheduler, ranks and a clock that moves one second a step, with the rules every step must keep."""

    def __init__(self, settings: EngineConfig, depth: int = 1) -> None:
        self.config, self.depth = settings, depth
        self.scheduler = Scheduler(settings)
        self.rank = ScriptedRank(settings.num_blocks, settings.block_size, VOCAB, settings.kv_owners, settings.dp_size)
        self.now = 0.0
        self.order = itertools.count()
        self.events: dict[str, list[TokenEvent]] = defaultdict(list)
        self.requests: dict[str, GenerateRequest] = {}
        self.in_flight: deque[StepResult] = deque()

    def add(self, *requests: GenerateRequest) -> None:
        for item in requests:
            check_request(item, self.config)
            self.requests[item.request_id] = item
            self.scheduler.add(Sequence.of(item, self.config.block_size, self.now, next(self.order)))

    def step(self) -> StepPlan | None:
        """Plan one step; apply the oldest result once `depth` are in flight (or nothing could be planned)."""
        self.now += 1
        self.note(self.scheduler.reap(self.now))
        before = [(sequence, sequence.dp_rank, sequence.sequence_id) for sequence in self.scheduler.running]
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            assert plan.rows
            for dp_rank in range(self.config.dp_size):
                assert sum(row.count for row in plan.of_dp_rank(dp_rank).rows) <= self.config.max_batch_tokens
            assert all(row.count <= self.config.max_chunk_tokens for row in plan.rows)
            preempted = {dp_rank for sequence, dp_rank, name in before if sequence.sequence_id != name}
            assert not preempted & {start.dp_rank for start in plan.started}, "something was admitted where the step preempted"
            self.in_flight.append(self.rank.run(StepPlan.unpack(plan.pack())))
        assert all(len(dp_rank.running) <= self.config.max_sequences for dp_rank in self.scheduler.dp_ranks)
        if self.in_flight and (plan is None or len(self.in_flight) >= self.depth):
            self.note(self.scheduler.update(self.in_flight.popleft()))
        for dp_rank in self.scheduler.dp_ranks:
            dp_rank.pool.check()
        return plan

    def cancel(self, request_id: str) -> None:
        self.note(self.scheduler.cancel(request_id))

    def note(self, events: list[TokenEvent]) -> None:
        for event in events:
            assert not any(earlier.finish for earlier in self.events[event.request_id]), "an event after the last one"
            self.events[event.request_id].append(event)

    def drain(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if not self.scheduler.num_live and not self.in_flight:
                break
            self.step()
        assert self.scheduler.num_live == 0, "requests do not finish"
        assert not any(dp_rank.pool.num_held for dp_rank in self.scheduler.dp_ranks), "blocks did not come back"
        assert self.scheduler.waiting.num_requests == self.scheduler.waiting.num_tokens == 0

    def tokens(self, request_id: str) -> list[int]:
        return [token for event in self.events[request_id] for token in event.tokens]

    def finish(self, request_id: str) -> str | None:
        return self.events[request_id][-1].finish

    def check_outputs(self) -> None:
        """Every request ended once, with what it would have got alone (or a front of it, where it was cut short)."""
        for name, item in self.requests.items():
            assert [bool(event.finish) for event in self.events[name]].count(True) == 1
            length = min(item.max_tokens, self.config.capacity - len(item.prompt))
            alone = continuation(item.prompt, length, VOCAB)
            if self.finish(name) == "length":
                assert self.tokens(name) == alone
                if item.sampling.prompt_logprobs is not None:
                    sent_logprobs = [event.prompt_logprobs for event in self.events[name]]
                    assert sent_logprobs[0] == prompt_logprobs(item.prompt)
                    assert not any(sent_logprobs[1:])
            else:
                assert self.finish(name) in ("abort", "deadline")
                assert self.tokens(name) == alone[: len(self.tokens(name))]


REQUESTS = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, 1), min_size=1, max_size=24),
        "max_tokens": st.integers(0, 24),
        "priority": st.integers(0, 2),
        "tenant": st.sampled_from("ab"),
        "cache_salt": st.sampled_from(["", "s"]),
        "timeout_s": st.none() | st.integers(1, 40),
        "sampling": st.sampled_from([SamplingParams(), SamplingParams(prompt_logprobs=0)]),
    }
)


def split_over_owners(num_blocks: int, kv_owners: int, **changes: Any) -> EngineConfig:
    """About `num_blocks` blocks, split over the owners."""
    return config(num_blocks=-(-num_blocks // kv_owners), kv_owners=kv_owners, **changes)


CONFIGS = st.builds(
    split_over_owners,
    num_blocks=st.integers(7, 16),
    kv_owners=st.integers(1, 3),
    dp_size=st.integers(1, 3),
    max_batch_tokens=st.integers(4, 20),
    max_chunk_tokens=st.integers(1, 12),
    stages=st.integers(1, 3),
    micro_batch_rows=st.integers(1, 3),
    micro_batch_tokens=st.sampled_from([1, 4, 128]),
    prefix_cache=st.booleans(),
    overdue_after_s=st.sampled_from([3.0, 1000.0]),
)


@settings(deadline=None, max_examples=150)
@given(CONFIGS, st.lists(st.tuples(st.integers(0, 3), REQUESTS), min_size=1, max_size=14), st.data())
def test_whatever_comes_all_finish_with_their_own_tokens(
    settings: EngineConfig, arrivals: list[Any], data: st.DataObject
) -> None:
    bench = Bench(settings, depth=data.draw(st.integers(1, 5), "steps in flight"))
    for number, (steps_before, fields) in enumerate(arrivals):
        for _ in range(steps_before):
            bench.step()
        bench.add(GenerateRequest(request_id=str(number), **fields))
        if data.draw(st.integers(0, 5)) == 0:
            bench.cancel(str(data.draw(st.integers(0, number))))
    bench.drain()
    bench.check_outputs()


@pytest.mark.parametrize(("num_blocks", "owners"), [(9, 1), (5, 2), (3, 3)])
def test_preemption_changes_no_token(num_blocks: int, owners: int) -> None:
    bench = Bench(config(num_blocks=num_blocks, kv_owners=owners))
    bench.add(*(request(str(i), [i] * 7, 25) for i in range(4)))
    bench.drain()
    assert bench.scheduler.counts.preemptions > 0
    bench.check_outputs()


def test_the_victim_is_the_least_urgent_and_then_the_youngest() -> None:
    bench = Bench(config(num_blocks=9))
    bench.add(request("old", [1] * 7, 20), request("low", [2] * 7, 20, priority=1), request("young", [3] * 7, 20))
    bench.drain()
    bench.check_outputs()
    admitted = {start.sequence_id: start.tokens[0] for plan in bench.rank.plans for start in plan.started}
    ended = [admitted[sequence_id] for plan in bench.rank.plans for sequence_id in plan.ended]
    assert ended[:3] == [2, 3, 1], "low goes first, then young; old is never preempted"


def test_a_preempted_prompt_that_is_scored_gets_every_logprob() -> None:
    """A scored prompt in chunks, preempted half way by a decode that runs out of blocks."""
    bench = Bench(config(num_blocks=10, max_chunk_tokens=2))
    bench.add(request("first", [1] * 3, 30))
    for _ in range(3):
        bench.step()
    bench.add(request("scored", list(range(28)), 2, sampling=SamplingParams(prompt_logprobs=0), priority=1))
    bench.drain()
    assert bench.scheduler.counts.preemptions > 0
    bench.check_outputs()


def test_what_was_scored_once_is_not_scored_again() -> None:
    bench = Bench(config(num_blocks=9))
    bench.add(request("a", [1] * 7, 25), request("b", [2] * 7, 25, sampling=SamplingParams(prompt_logprobs=0)))
    bench.drain()
    starts = [start for plan in bench.rank.plans for start in plan.started if start.tokens[0] == 2]
    assert len(starts) > 1, "this test wants a preemption"
    assert [start.sampling.prompt_logprobs for start in starts] == [0] + [None] * (len(starts) - 1)
    bench.check_outputs()


def test_a_second_equal_prompt_is_found_in_the_cache() -> None:
    bench = Bench(config())
    prompt = list(range(12))
    bench.add(request("a", prompt))
    bench.drain()
    bench.add(request("b", prompt), request("c", [*prompt, 40]))
    bench.drain()
    assert bench.events["a"][0].cached_tokens == 0
    assert bench.events["b"][0].cached_tokens == 8, "the last token must be run, so the last block cannot be a hit"
    assert bench.events["c"][0].cached_tokens == 12
    bench.check_outputs()


def test_generated_tokens_are_found_too() -> None:
    bench = Bench(config())
    bench.add(request("a", [1, 2, 3], 14))
    bench.drain()
    bench.add(request("b", [1, 2, 3, *bench.tokens("a")]))
    bench.drain()
    assert bench.events["b"][0].cached_tokens == 16


@pytest.mark.parametrize(("salts", "cache", "hit"), [(("x", "x"), True, 8), (("x", "y"), True, 0), (("x", "x"), False, 0)])
def test_salts_isolate(salts: tuple[str, str], cache: bool, hit: int) -> None:
    bench = Bench(config(prefix_cache=cache))
    for name, salt in zip("ab", salts, strict=True):
        bench.add(request(name, list(range(10)), cache_salt=salt))
        bench.drain()
    assert bench.events["b"][0].cached_tokens == hit


def test_scoring_needs_every_logit_so_it_skips_the_cache() -> None:
    bench = Bench(config(max_chunk_tokens=5))
    sampling = SamplingParams(prompt_logprobs=2)
    bench.add(request("a", list(range(20))))
    bench.drain()
    bench.add(request("b", list(range(20)), 2, sampling=sampling), request("c", list(range(20)), 0, sampling=sampling))
    bench.drain()
    for name in "bc":
        assert bench.events[name][0].cached_tokens == 0
        assert bench.events[name][0].prompt_logprobs == prompt_logprobs(list(range(20)))
    assert bench.tokens("c") == []
    assert bench.finish("c") == "length"


def test_nothing_to_sample_and_nothing_to_score_needs_no_step() -> None:
    bench = Bench(config())
    bench.add(request("a", [1, 2], 0), request("b", [1], 0, sampling=SamplingParams(prompt_logprobs=0)))
    assert bench.step() is None
    assert [bench.finish(name) for name in "ab"] == ["length", "length"]
    assert bench.events["b"][0].prompt_logprobs == [None]


def test_ranks_that_leave_out_a_logprob_end_that_request_only() -> None:
    bench = Bench(config())
    bench.add(request("a", [1, 2, 3], sampling=SamplingParams(prompt_logprobs=0)), request("b", [4, 5]))
    plan = bench.scheduler.schedule(0.0)
    assert plan is not None
    bench.note(bench.scheduler.update(bench.rank.run(plan).model_copy(update={"prompt_logprobs": []})))
    assert bench.events["a"][0].finish == "error"
    assert bench.events["a"][0].error == "the ranks left out the logprobs of 2 prompt tokens"
    bench.drain()
    assert bench.finish("b") == "length"


def test_a_result_that_answers_no_plan_is_noticed() -> None:
    bench = Bench(config())
    bench.add(request("a", [1]))
    plan = bench.scheduler.schedule(0.0)
    assert plan is not None
    with pytest.raises(ResultMismatch, match=r"result of step 7, steps in flight: \[0\]"):
        bench.scheduler.update(StepResult(step=7))
    with pytest.raises(ResultMismatch, match="samples True"):
        bench.scheduler.update(StepResult(step=0))


def test_stop_tokens_wait_for_min_tokens() -> None:
    out = continuation([1], 12, VOCAB)
    assert len(set(out[:6])) == 6, "this test wants distinct tokens"
    bench = Bench(config())
    for name, least in (("a", 0), ("b", 2), ("c", 3)):
        bench.add(request(name, [1], 6, sampling=SamplingParams(stop_token_ids=(out[2], 49), min_tokens=least)))
    bench.drain()
    assert [bench.tokens(name) for name in "abc"] == [out[:3], out[:3], out[:6]]
    assert (bench.finish("a"), bench.events["a"][-1].stop_token) == ("stop", out[2])
    assert (bench.finish("c"), bench.events["c"][-1].stop_token) == ("length", None)


def test_a_sequence_ends_where_the_model_or_the_cache_ends() -> None:
    for limits, total in ((config(max_model_len=10), 10), (config(num_blocks=2), 8)):
        bench = Bench(limits)
        bench.add(request("a", [1, 2, 3], 1000))
        bench.drain()
        assert 3 + len(bench.tokens("a")) == total
        assert bench.finish("a") == "length"


@pytest.mark.parametrize("owners", [2, 3])
def test_a_context_of_every_owners_pages_fits(owners: int) -> None:
    """With 4 blocks of 4 tokens each, one owner holds 16 tokens; a sequence may have that times the owners."""
    settings = config(num_blocks=4, kv_owners=owners, max_model_len=1000)
    bench = Bench(settings)
    bench.add(request("whole", list(range(16 * owners - 5)), 1000))
    with pytest.raises(PromptTooLong):
        check_request(request("more", [1] * 16 * owners), settings)
    bench.drain()
    assert 16 * owners - 5 + len(bench.tokens("whole")) == settings.capacity == 16 * owners
    bench.check_outputs()


def test_owners_hold_a_sequence_to_within_one_block() -> None:
    bench = Bench(config(num_blocks=8, kv_owners=3))
    bench.add(request("a", list(range(30)), 1))
    bench.step()
    (sequence,) = bench.scheduler.running
    assert [block % 3 for block in sequence.blocks] == [0, 1, 2, 0, 1, 2, 0, 1]
    bench.drain()


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    settings = config(num_blocks=3, max_model_len=20)
    check_request(request("a", [1] * 11), settings)
    check_request(request("a", [1] * 12, 0), settings)
    with pytest.raises(
        PromptTooLong, match=r"the prompt has 12 tokens; at most 11 fit \(model length 20, KV cache 12 tokens"
    ) as caught:
        check_request(request("a", [1] * 12), settings)
    assert (caught.value.prompt_tokens, caught.value.longest, caught.value.code) == (12, 11, "prompt_too_long")


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("prompt", request("a", [])),
        ("prompt", request("a", [3, -1])),
        ("prompt", request("a", [50])),
        ("max_tokens", request("a", [1], -1)),
        ("timeout_s", request("a", [1], timeout_s=0.0)),
        ("timeout_s", request("a", [1], timeout_s=float("nan"))),
        ("logit_bias", request("a", [1], sampling=SamplingParams(logit_bias={99: 1.0}))),
    ],
)
def test_what_no_engine_could_serve_is_refused(field: str, wrong: GenerateRequest) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_request(wrong, config(vocab_size=VOCAB))
    assert caught.value.field == field


def test_a_step_must_hold_every_running_sequence() -> None:
    with pytest.raises(ValidationError, match="max_sequences=17 exceeds max_batch_tokens=16"):
        config(max_sequences=17)


def test_deadlines_end_waiting_and_running_requests() -> None:
    bench = Bench(config(max_sequences=1))
    bench.add(request("runs", [1], 40, timeout_s=5), request("waits", [2], 40, timeout_s=3), request("free", [3], 2))
    bench.drain()
    assert [bench.finish(name) for name in ("runs", "waits", "free")] == ["deadline", "deadline", "length"]
    assert bench.tokens("waits") == []
    assert len(bench.tokens("runs")) == 4


def test_a_deadline_does_not_reach_a_later_request_of_the_same_name() -> None:
    bench = Bench(config())
    bench.add(request("a", [1], 1, timeout_s=4))
    bench.drain()
    bench.events.clear()
    bench.add(request("a", [1], 20))
    bench.drain()
    assert bench.finish("a") == "length"


def test_cancelling_twice_or_at_random_is_harmless() -> None:
    bench = Bench(config())
    bench.cancel("nobody")
    bench.add(request("a", [1], 40))
    bench.step()
    bench.cancel("a")
    bench.cancel("a")
    assert [event.finish for event in bench.events["a"]] == [None, "abort"]
    assert bench.scheduler.counts.aborts == 1
    assert bench.scheduler.dp_ranks[0].pool.num_available == 16
    bench.add(request("b", [1], 1))
    bench.drain()
    assert bench.rank.plans[-1].ended == [0], "the ranks hear of it with the next plan"


def test_decodes_run_before_prompts_and_prompts_always_progress() -> None:
    bench = Bench(config(max_batch_tokens=5))
    bench.add(request("a", [1], 12), request("b", list(range(20)), 2))
    counts = []
    while bench.scheduler.num_live:
        plan = bench.step()
        assert plan is not None
        counts.append([row.count for row in plan.rows])
    assert counts[:4] == [[1, 4], [1, 4], [1, 4], [1, 4]]
    bench.check_outputs()


def test_lower_priority_values_go_first() -> None:
    bench = Bench(config(max_sequences=1))
    bench.add(*(request(f"{priority}", [priority], 2, priority=priority) for priority in (5, 1, 3)))
    assert order_of_first_tokens(bench) == ["1", "3", "5"]


def order_of_first_tokens(bench: Bench) -> list[str]:
    bench.drain()
    return list(bench.events)


def test_tenants_take_turns_by_tokens() -> None:
    """One tenant floods the queue; another that comes later is not kept behind it, nor does it get credit for the past."""
    bench = Bench(config(max_sequences=1, prefix_cache=False))
    bench.add(*(request(f"flood{i}", [1, 2, 3, 4], 4, tenant="flood") for i in range(6)))
    while not any(event.finish for event in bench.events["flood1"]):
        bench.step()
    bench.add(*(request(f"late{i}", [1, 2, 3, 4], 4, tenant="late") for i in range(4)))
    order = order_of_first_tokens(bench)
    assert order[2:8] == ["flood2", "late0", "flood3", "late1", "flood4", "late2"] or order[2:8] == [
        "late0",
        "flood2",
        "late1",
        "flood3",
        "late2",
        "flood4",
    ]


def test_a_low_priority_is_not_starved() -> None:
    """Under an endless stream of urgent requests the patient one runs once it is overdue."""
    bench = Bench(config(max_sequences=1, overdue_after_s=20.0))
    bench.add(request("patient", [9], 2, priority=9))
    number = 0
    while "patient" not in bench.events:
        bench.add(request(f"urgent{number}", [1], 2))
        number += 1
        bench.step()
        assert bench.now < 30, "starved"
    assert bench.now >= 20


def test_a_large_prompt_is_not_overtaken_by_small_ones() -> None:
    bench = Bench(config(num_blocks=8))
    bench.add(request("small", [1] * 4, 12))
    bench.step()
    bench.add(request("large", [2] * 27, 2), *(request(f"later{i}", [3], 2) for i in range(3)))
    assert order_of_first_tokens(bench)[:2] == ["small", "large"]


def test_a_row_without_a_possible_token_ends_that_request_only() -> None:
    bench = Bench(config())
    bench.add(request("bad", [1, 2]), request("good", [3, 4]))
    plan = bench.scheduler.schedule(1.0)
    assert plan is not None
    result = bench.rank.run(plan)
    spoiled = [item.model_copy(update={"error": "NaN logits"}) if at == 0 else item for at, item in enumerate(result.sampled)]
    events = bench.scheduler.update(result.model_copy(update={"sampled": spoiled}))
    assert [(event.request_id, event.tokens == [], event.finish, event.error) for event in events] == [
        ("bad", True, "error", "NaN logits"),
        ("good", False, None, None),
    ]
