"""The engine's thread over scripted ranks: delivery, refusal, failure, restart."""

import queue
import random
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from actors.engine.admission import DuplicateRequest, EngineBusy, EngineDown, InvalidRequest, PromptTooLong
from actors.engine.config.engine_config import EngineConfig, OffloadConfig
from actors.engine.engine import Engine
from actors.engine.link.link import LinkError
from actors.engine.link.scripted import ScriptedLink, continuation, prompt_logprobs
from actors.engine.scheduler import Scheduler
from actors.kv_offload.block_part import KVFormat
from actors.wire.plans import StepPlan
from actors.wire.requests import GenerateRequest, SamplingParams, TokenEvent
from actors.wire.tier_config import TierConfig
from placement.layout.layout import Layout
from tests.support.kv.handoff_cases import heads_model
from tests.support.waiting import wait_until

WAIT_S = 20.0
VOCAB = 1000


def config(**changes: Any) -> EngineConfig:
    values = {"num_blocks": 24, "block_size": 4, "max_model_len": 90, "max_batch_tokens": 32, "max_sequences": 8}
    return EngineConfig(**{**values, **changes})


def request(request_id: str, prompt: list[int] | None = None, max_tokens: int = 4, **changes: Any) -> GenerateRequest:
    return GenerateRequest(request_id=request_id, prompt=prompt or [1, 2, 3], max_tokens=max_tokens, **changes)


class Inbox:
    """Collects events, and waits for the last one of a request."""

    def __init__(self) -> None:
        self.events: dict[str, list[TokenEvent]] = defaultdict(list)
        self._changed = threading.Condition()

    def __call__(self, event: TokenEvent) -> None:
        with self._changed:
            self.events[event.request_id].append(event)
            self._changed.notify_all()

    def wait(self, *names: str) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: all(self.finals(name) for name in names), WAIT_S)
        assert done, f"waited {WAIT_S} s for {[name for name in names if not self.finals(name)]}"

    def finals(self, name: str) -> list[str]:
        return [event.finish for event in self.events[name] if event.finish]

    def tokens(self, name: str) -> list[int]:
        return [token for event in self.events[name] for token in event.tokens]


class Gate:
    """Holds the ranks inside a step until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, plan: StepPlan) -> None:
        self.entered.set()
        assert self.opened.wait(WAIT_S)


Start = Callable[..., Engine]


@pytest.fixture
def start() -> Iterator[Start]:
    """Makes a started engine and closes it afterwards."""
    engines: list[Engine] = []

    def make(link: ScriptedLink | None = None, **changes: Any) -> Engine:
        settings = config(**changes)
        engines.append(Engine(settings, link or ScriptedLink(settings.num_blocks, settings.block_size, VOCAB)))
        engines[-1].start()
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def test_two_hundred_mixed_requests(start: Start) -> None:
    draw, engine, inbox = random.Random(0), start(), Inbox()
    requests = [
        request(
            str(number),
            [draw.randrange(3) for _ in range(draw.randrange(1, 40))],
            draw.randrange(40),
            priority=draw.randrange(3),
            tenant=draw.choice("abc"),
            sampling=SamplingParams(prompt_logprobs=draw.choice([None, None, 0]), logprobs=draw.choice([None, 0])),
        )
        for number in range(200)
    ]
    aborted = {str(number) for number in range(0, 200, 9)}
    for item in requests:
        engine.submit(item, inbox)
        if item.request_id in aborted:
            engine.cancel(item.request_id)
    inbox.wait(*(item.request_id for item in requests))
    for item in requests:
        name, alone = item.request_id, continuation(item.prompt, item.max_tokens, VOCAB)
        assert len(inbox.finals(name)) == 1
        if inbox.finals(name) == ["length"]:
            assert inbox.tokens(name) == alone
            if item.sampling.prompt_logprobs is not None:
                assert inbox.events[name][0].prompt_logprobs == prompt_logprobs(item.prompt)
            logprobs = [entry.token for event in inbox.events[name] for entry in event.logprobs]
            assert logprobs == ([] if item.sampling.logprobs is None else alone)
        else:
            assert inbox.finals(name) == ["abort"]
            assert name in aborted
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.cache_hit_tokens > 0
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks == 24
    assert (stats.running, stats.waiting, stats.waiting_tokens, stats.finished) == (0, 0, 0, 200)
    assert len(stats.recent_step_s) == min(stats.steps, 256)
    assert engine.healthy() is None


def test_an_idle_engine_does_not_turn(start: Start) -> None:
    engine, inbox = start(), Inbox()
    engine.submit(request("a"), inbox)
    inbox.wait("a")
    engine.cancel("a")
    engine.submit(request("b"), inbox)
    inbox.wait("b")
    steps = engine.stats().steps
    assert steps == 8, "one step a token"
    assert engine.stats().aborts == 0


def test_an_odd_request_stops_nobody(start: Start) -> None:
    engine, inbox = start(), Inbox()
    odd = [
        (lambda: engine.submit(GenerateRequest(request_id="empty", prompt=[], max_tokens=1), inbox), InvalidRequest),
        (lambda: engine.submit(request("huge", [2**70]), inbox), InvalidRequest),
        (lambda: engine.submit(request("long", [1] * 90), inbox), PromptTooLong),
        (lambda: engine.submit(request("minus", max_tokens=-5), inbox), InvalidRequest),
    ]
    for submit, refusal in odd:
        with pytest.raises(refusal):
            submit()
        engine.submit(request("plain"), inbox)
        inbox.wait("plain")
        assert inbox.events.pop("plain")[-1].finish == "length"
    for max_tokens in (0, 1):
        for alternatives in (None, 0, 5):
            name = f"{max_tokens} {alternatives}"
            engine.submit(request(name, [7], max_tokens, sampling=SamplingParams(prompt_logprobs=alternatives)), inbox)
            inbox.wait(name)
            assert inbox.finals(name) == ["length"]
    assert set(inbox.events) & {"empty", "huge", "long", "minus"} == set()


def test_a_receiver_that_raises_loses_its_request_only(start: Start) -> None:
    engine, inbox = start(), Inbox()

    def broken(event: TokenEvent) -> None:
        raise RuntimeError("client went away")

    engine.submit(request("broken", max_tokens=50), broken)
    engine.submit(request("fine", max_tokens=30), inbox)
    inbox.wait("fine")
    assert inbox.tokens("fine") == continuation([1, 2, 3], 30, VOCAB)
    assert engine.stats().running == 0
    assert engine.healthy() is None


def test_a_receiver_may_call_the_engine(start: Start) -> None:
    engine, inbox = start(), Inbox()

    def chained(event: TokenEvent) -> None:
        inbox(event)
        engine.cancel(event.request_id)
        if event.finish:
            engine.submit(request("second"), inbox)

    engine.submit(request("first", max_tokens=50), chained)
    inbox.wait("first", "second")
    assert inbox.finals("first") == ["abort"]


def test_a_full_queue_refuses_at_once(start: Start) -> None:
    gate = Gate()
    engine, inbox = start(ScriptedLink(24, 4, VOCAB, gate), max_waiting=4, max_waiting_tokens=20), Inbox()
    engine.submit(request("running", [1] * 30), inbox)  # more than the cap, but nothing waits
    assert gate.entered.wait(WAIT_S)
    for number in range(4):
        engine.submit(request(str(number), [1, 2]), inbox)
    with pytest.raises(EngineBusy, match="4 requests are waiting already; the limit is 4"):
        engine.submit(request("fifth", [1]), inbox)
    engine.cancel("0")
    gate.opened.set()
    inbox.wait("running", *"0123")
    engine.submit(request("later"), inbox)
    inbox.wait("later")
    assert "fifth" not in inbox.events


def test_queued_tokens_are_capped(start: Start) -> None:
    gate = Gate()
    engine, inbox = start(ScriptedLink(24, 4, VOCAB, gate), max_waiting_tokens=20), Inbox()
    engine.submit(request("running"), inbox)
    assert gate.entered.wait(WAIT_S)
    engine.submit(request("a", [1] * 15), inbox)
    with pytest.raises(EngineBusy, match="15 prompt tokens are waiting already; the limit is 20"):
        engine.submit(request("b", [1] * 6), inbox)
    engine.submit(request("c", [1] * 5), inbox)
    gate.opened.set()
    inbox.wait("running", "a", "c")


def test_two_requests_of_one_name_are_not_served_at_once(start: Start) -> None:
    gate = Gate()
    engine, inbox = start(ScriptedLink(24, 4, VOCAB, gate)), Inbox()
    engine.submit(request("a"), inbox)
    with pytest.raises(DuplicateRequest):
        engine.submit(request("a"), inbox)
    gate.opened.set()
    inbox.wait("a")
    assert len(inbox.events["a"]) == 4


def test_a_step_that_never_ends_is_noticed(start: Start) -> None:
    link = ScriptedLink(24, 4, VOCAB)
    link.mute()
    engine, inbox = start(link, step_timeout_s=0.3), Inbox()
    engine.submit(request("a"), inbox)
    inbox.wait("a")
    assert inbox.events["a"][-1].finish == "lost"
    assert "step 0 (1 rows) took over 0.3 s" in str(inbox.events["a"][-1].error)
    assert "step 0" in str(engine.healthy())
    with pytest.raises(EngineDown, match="step 0"):
        engine.submit(request("b"), inbox)


def test_health_sees_a_stuck_step_before_the_loop_does(start: Start) -> None:
    gate, now = Gate(), [100.0]
    engine, inbox = Engine(config(), ScriptedLink(24, 4, VOCAB, gate), clock=lambda: now[0]), Inbox()
    engine.start()
    engine.submit(request("a"), inbox)
    assert gate.entered.wait(WAIT_S)
    assert engine.healthy(159.0) is None
    assert engine.healthy(161.0) == "a step has not ended for 61.0 s (limit 60 s)"
    gate.opened.set()
    inbox.wait("a")
    engine.close()


def test_lost_ranks_and_new_ones(start: Start) -> None:
    gate = Gate()
    link = ScriptedLink(24, 4, VOCAB, gate)
    engine, inbox = start(link), Inbox()
    for name in "abc":
        engine.submit(request(name, max_tokens=50), inbox)
    assert gate.entered.wait(WAIT_S)
    engine.fail("rank 1 died")
    assert all([event.finish for event in inbox.events[name]] == ["lost"] for name in "abc"), "told before fail() returns"
    assert inbox.events["a"][0].error == "rank 1 died"
    with pytest.raises(EngineDown, match="rank 1 died"):
        engine.submit(request("d"), inbox)
    engine.fail("rank 2 died as well")
    assert engine.healthy() == "rank 1 died", "the first reason is the cause"
    gate.opened.set()
    engine.restart(ScriptedLink(24, 4, VOCAB))
    assert link.is_closed
    assert engine.healthy() is None
    assert engine.stats().free_blocks == 24
    fresh = Inbox()
    engine.submit(request("a"), fresh)
    fresh.wait("a")
    assert fresh.tokens("a") == continuation([1, 2, 3], 4, VOCAB)
    assert [inbox.finals(name) for name in "abc"] == [["lost"]] * 3


def test_a_broken_link_fails_everything_with_the_reason(start: Start) -> None:
    def lose(plan: StepPlan) -> None:
        if plan.step == 3:
            raise LinkError("rank 0 is gone")

    engine, inbox = start(ScriptedLink(24, 4, VOCAB, lose)), Inbox()
    for name in "ab":
        engine.submit(request(name, max_tokens=30), inbox)
    inbox.wait("a", "b")
    assert inbox.finals("a") == inbox.finals("b") == ["lost"]
    assert engine.healthy() == "the ranks are lost: rank 0 is gone"


def test_a_bug_in_the_scheduler_fails_everything_and_hangs_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Scheduler, now: float) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(Scheduler, "schedule", broken)
    engine, inbox = start(), Inbox()
    engine.submit(request("a"), inbox)
    inbox.wait("a")
    assert inbox.finals("a") == ["lost"]
    assert engine.healthy() == "the engine failed: ZeroDivisionError('planted')"


def test_failing_at_any_moment_ends_each_request_exactly_once(start: Start) -> None:
    engine, inbox = start(), Inbox()
    submitted: queue.SimpleQueue[str] = queue.SimpleQueue()
    for round_number in range(20):
        names = [f"{round_number}.{number}" for number in range(12)]
        for number, name in enumerate(names):
            engine.submit(request(name, [number], 20), inbox)
            submitted.put(name)
            if number == round_number % 12:
                engine.fail("again")
                break
        engine.restart(ScriptedLink(24, 4, VOCAB))
    names = [submitted.get() for _ in range(submitted.qsize())]
    for name in names:
        assert inbox.finals(name) in (["lost"], ["length"])
        assert inbox.events[name][-1].finish


def test_closing_ends_what_is_left() -> None:
    gate = Gate()
    engine, inbox = Engine(config(), ScriptedLink(24, 4, VOCAB, gate)), Inbox()
    with pytest.raises(EngineDown, match="not been started"):
        engine.submit(request("early"), inbox)
    assert engine.healthy() is not None
    engine.start()
    engine.submit(request("a"), inbox)
    gate.opened.set()
    engine.close()
    engine.close()
    inbox.wait("a")
    with pytest.raises(EngineDown, match="closed"):
        engine.submit(request("b"), inbox)


def test_neither_torch_nor_ray_comes_with_the_engine() -> None:
    script = "import sys, actors.engine.engine, actors.engine.link.zmq_link; print({'torch', 'ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


def test_requests_that_stuck_tiers_starve_make_a_replica_unhealthy() -> None:
    """Blocks of a fetch that no rank answers are all there are: the next request waits, and nothing runs."""
    kv_format = KVFormat.of(heads_model(4), "a" * 64, "float32", 4)
    settings = TierConfig(host_cache=1 << 20)
    offload = OffloadConfig(tiers=settings, layout=Layout.parse(""), kv_format=kv_format, block_bytes=64, fetch_timeout_s=0.01)
    small = config(offload=offload, num_blocks=6, max_model_len=24, step_timeout_s=0.3)
    engine, inbox = Engine(small, ScriptedLink(6, 4, VOCAB)), Inbox()
    engine.start()
    try:
        for name, prompt in (("first", [*range(20)]), ("second", [*range(50, 71)])):
            engine.submit(request(name, prompt, max_tokens=1), inbox)
            inbox.wait(name)
        engine.submit(request("third", [*range(20)], max_tokens=1), inbox)  # to be fetched, and there is no other room
        wait_until(lambda: engine.healthy() is not None, WAIT_S, lambda: f"healthy with {engine.stats()}")
        assert engine.stats().tier_late == 1
        assert "tiers have not filled" in str(engine.healthy())
        engine.cancel("third")
        inbox.wait("third")
    finally:
        engine.close()
