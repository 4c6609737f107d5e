"""A request whose replicas are lost one after the other: its client sees one stream, or one error where that cannot be."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import chain, repeat

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ray.exceptions import RayActorError

from actors.engine.link.scripted import continuation
from actors.engine.link.token_stream import ReplyTo, TokenSender
from actors.wire.requests import GenerateRequest, SamplingParams, TokenEvent
from serve_app.routing import handle_backend
from serve_app.routing.backend import BackendRefused
from serve_app.routing.handle_backend import HandleBackend
from serve_app.routing.replay import MAX_FRUITLESS, MAX_REPLAYS, Replay
from tests.support.handles import Handle

PROMPT, LENGTH, VOCAB = [5, 6, 7], 12, 100
WHOLE = continuation(PROMPT, LENGTH, VOCAB)
WAIT_S = 1.0
Fate = tuple[int, str]
"""The number of tokens that a replica sends, and its end: it dies, loses its ranks, refuses the request, or lasts."""


@pytest.fixture(autouse=True, scope="module")
def soon() -> Iterator[None]:
    """A lost request looks for another replica without a pause."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handle_backend, "_REPLAY_EVERY_S", 0.005)
        yield


class Replicas:
    """One replica after the other, each with a fate; the last ones last."""

    def __init__(self, *fates: Fate) -> None:
        self.sender, self.asked, self.taken = TokenSender(), list[GenerateRequest](), list[str]()
        self._fates: Iterator[Fate] = chain(fates, repeat((LENGTH, "lasts")))

    def backend(self) -> HandleBackend:
        return HandleBackend(Handle(self.answer), wait_s=5.0, replay_wait_s=WAIT_S)  # type: ignore[arg-type]

    async def answer(self, request: GenerateRequest, to: ReplyTo, _: str) -> bytes | None:
        count, end = next(self._fates)
        self.asked.append(request)
        self.taken += [request.request_id] if end != "refuses" else []
        if end == "refuses":
            return TokenEvent(request_id=request.request_id, finish="error", refused="engine_down", error="down").pack()
        if (count, end) == (0, "dies"):
            raise RayActorError
        while not self.sender.connected(to):  # noqa: ASYNC110 - a socket has no event to wait for
            await asyncio.sleep(0.001)
        self.send(to, TokenEvent(request_id=request.request_id, cached_tokens=2))
        history, left = request.prompt + request.generated, request.max_tokens - len(request.generated)
        for number, token in enumerate(continuation(history, left, VOCAB)[:count]):
            last = "length" if number == left - 1 else None
            self.send(to, TokenEvent(request_id=request.request_id, tokens=[token], finish=last, cached_tokens=2))
        if left > count and end == "loses":
            self.send(to, TokenEvent(request_id=request.request_id, finish="lost", error="rank 1 died"))
        elif left > count:
            await asyncio.sleep(0.01)
            # What it sent last arrives after the news of its end.
            asyncio.get_running_loop().call_later(0.05, self.send, to, TokenEvent(request_id=request.request_id, tokens=[999]))
            raise RayActorError
        return None

    def send(self, to: ReplyTo, event: TokenEvent) -> None:
        self.sender.send(to, event)
        self.sender.flush()


async def ask(backend: HandleBackend, **fields: object) -> list[TokenEvent]:
    request = GenerateRequest(request_id="r", prompt=PROMPT, max_tokens=LENGTH, sampling=SamplingParams(seed=3), **fields)  # type: ignore[arg-type]
    return [event async for event in backend.generate(request)]


FATES = st.lists(st.tuples(st.integers(1, 5), st.sampled_from(["dies", "loses", "refuses"])), max_size=8)


@settings(max_examples=40, deadline=None)
@given(FATES)
@example([(1, "dies")] * 11)
@example([(0, "refuses"), (3, "loses"), (0, "dies"), (0, "refuses"), (4, "dies")])
def test_the_client_sees_one_stream(fates: list[Fate]) -> None:
    async def run() -> None:
        replicas = Replicas((1, "loses"), *fates)
        backend = replicas.backend()
        events = await ask(backend)
        assert [token for event in events for token in event.tokens] == WHOLE
        assert [event.finish for event in events if event.finish] == ["length"]
        assert max(event.cached_tokens for event in events) == 2
        assert len(set(replicas.taken)) == len(replicas.taken), "late events of a lost replica must find no queue"
        assert all(request.max_tokens == LENGTH and request.sampling.seed == 3 for request in replicas.asked)
        gauges = backend.gauges()
        assert gauges["requests_replayed"] >= 1
        assert gauges["requests_given_up"] == 0

    asyncio.run(run())


async def test_a_request_that_ends_every_replica_it_is_given_is_not_tried_for_ever() -> None:
    replicas = Replicas(*[(0, "loses")] * 10)
    backend = replicas.backend()
    *_, last = await ask(backend)
    assert last.finish == "error"
    assert "rank 1 died" in (last.error or "")
    assert "2 replicas in turn were lost while they computed it" in (last.error or "")
    assert len(replicas.asked) == MAX_FRUITLESS
    assert backend.gauges()["requests_given_up"] == 1


async def test_however_far_it_comes_there_is_an_end_to_replays() -> None:
    request = GenerateRequest(request_id="r", prompt=PROMPT, max_tokens=100)
    replay = Replay(request, WAIT_S, WAIT_S)
    for _ in range(MAX_REPLAYS):
        assert replay.attempt() is not None
        replay.on_event(TokenEvent(request_id="r", tokens=[1]))
        assert replay.on_loss() is None
    attempt = replay.attempt()
    assert attempt is not None
    assert attempt.generated == [1] * MAX_REPLAYS
    replay.on_event(TokenEvent(request_id="r", tokens=[1]))
    assert replay.on_loss() == f"{MAX_REPLAYS + 1} replicas were lost while they computed it"


async def test_an_accepted_request_waits_while_nobody_takes_it_and_only_so_long() -> None:
    replicas = Replicas((2, "loses"), *[(0, "refuses")] * 1000)
    backend, found = replicas.backend(), list[int]()
    began = asyncio.get_running_loop().time()

    async def read() -> None:
        async for event in backend.generate(GenerateRequest(request_id="r", prompt=PROMPT, max_tokens=LENGTH)):
            found.extend(event.tokens)

    with pytest.raises(BackendRefused, match="down"):
        await read()
    assert found == WHOLE[:2]
    assert WAIT_S <= asyncio.get_running_loop().time() - began < WAIT_S + 2
    assert backend.gauges()["requests_given_up"] == 1


async def test_a_new_request_that_nobody_takes_is_refused_at_once() -> None:
    backend = Replicas(*[(0, "refuses")] * 1000).backend()
    with pytest.raises(BackendRefused, match="down"):
        await ask(backend)
    assert backend.gauges() == {"requests_replayed": 0, "requests_given_up": 0}


async def test_the_time_limit_of_a_request_covers_all_its_replicas() -> None:
    replicas = Replicas((2, "loses"), *[(0, "refuses")] * 1000)
    *_, last = await ask(replicas.backend(), timeout_s=0.5)
    assert last.finish == "deadline"
    limits = [request.timeout_s or 0 for request in replicas.asked]
    assert limits == sorted(limits, reverse=True)
    assert limits[-1] < 0.4


async def test_scores_of_the_prompt_are_asked_for_until_they_were_sent() -> None:
    request = GenerateRequest(request_id="r", prompt=PROMPT, max_tokens=9, sampling=SamplingParams(prompt_logprobs=1))
    replay = Replay(request, WAIT_S, WAIT_S)
    assert replay.attempt() is not None
    replay.on_event(TokenEvent(request_id="r"))
    assert replay.on_loss() is None
    again = replay.attempt()
    assert again is not None
    assert again.sampling.prompt_logprobs == 1
    replay.on_event(TokenEvent(request_id="r", tokens=[1], prompt_logprobs=[None] * 3))
    assert replay.on_loss() is None
    rest = replay.attempt()
    assert rest is not None
    assert (rest.generated, rest.sampling.prompt_logprobs) == ([1], None)


async def test_a_new_request_does_not_wait_as_long_as_one_that_was_lost() -> None:
    replicas = Replicas(*[(0, "dies")] * 1000)
    backend = HandleBackend(Handle(replicas.answer), wait_s=0.3, replay_wait_s=60.0)  # type: ignore[arg-type]
    with pytest.raises(BackendRefused, match=r"RayActorError; no replica took the request for 0\.3 s"):
        await ask(backend)
