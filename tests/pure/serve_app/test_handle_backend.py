"""A request whose client goes away is given up whenever that happens, also in the turn in which a replica takes it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayActorError

from actors.engine.link.token_stream import ReplyTo, TokenSender
from actors.wire.requests import GenerateRequest, SamplingParams, TokenEvent
from serve_app.routing.backend import BackendRefused, Health
from serve_app.routing.handle_backend import HandleBackend, _joined
from tests.support.handles import Handle

REQUEST = GenerateRequest(request_id="r", prompt=[1], max_tokens=4, sampling=SamplingParams())


@pytest.mark.parametrize("turns", range(5))
async def test_a_cancellation_that_comes_with_the_first_event_is_not_lost(turns: int) -> None:
    backend = HandleBackend(SimpleNamespace(options=lambda method_name: None), wait_s=5.0, replay_wait_s=0.3)  # type: ignore[arg-type]
    events: asyncio.Queue[TokenEvent] = asyncio.Queue()
    went_on = False

    async def asks() -> None:
        nonlocal went_on
        await backend._taken(REQUEST, events)
        went_on = True
        await asyncio.sleep(5)

    asking = asyncio.create_task(asks())
    await asyncio.sleep(0)
    events.put_nowait(TokenEvent(request_id="r"))
    for _ in range(turns):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking], timeout=1)
    assert asking.cancelled(), f"it went on ({went_on=}) although it was cancelled"


async def test_a_request_nobody_takes_is_refused_in_time() -> None:
    backend = HandleBackend(SimpleNamespace(options=lambda method_name: None), wait_s=0.05, replay_wait_s=0.3)  # type: ignore[arg-type]
    with pytest.raises(Exception, match=r"no engine replica could take the request for 0\.05 s"):
        await backend._taken(REQUEST, asyncio.Queue())


class _Engine:
    """A replica that admits or refuses a request, and sends what it is told."""

    def __init__(self) -> None:
        self.sender, self.admits, self.to = TokenSender(), asyncio.Event(), asyncio.Queue[ReplyTo]()
        self.refusal: TokenEvent | None = None
        self.ends = asyncio.Event()

    async def answer(self, request: GenerateRequest, to: ReplyTo, _: str) -> bytes | None:
        await self.admits.wait()
        if self.refusal is not None:
            return self.refusal.pack()
        while not self.sender.connected(to):  # noqa: ASYNC110 - a socket has no event to wait for
            await asyncio.sleep(0.001)
        self.to.put_nowait(to)
        self.send(to, TokenEvent(request_id="r"))
        await self.ends.wait()
        return None

    def send(self, to: ReplyTo, *events: TokenEvent) -> None:
        for event in events:
            self.sender.send(to, event)
        self.sender.flush()


async def test_the_first_event_says_that_the_request_is_admitted() -> None:
    engine = _Engine()
    backend = HandleBackend(Handle(engine.answer), wait_s=5.0, replay_wait_s=0.3)  # type: ignore[arg-type]
    events = backend.generate(REQUEST)
    first = asyncio.create_task(anext(events))
    await asyncio.sleep(0.05)
    assert not first.done(), "it was called, but may still refuse"
    engine.admits.set()
    assert (await asyncio.wait_for(first, 5)).is_empty
    engine.send(await engine.to.get(), TokenEvent(request_id="r", tokens=[7], cached_tokens=3, finish="length"))
    assert [event.tokens async for event in events] == [[7]]
    engine.sender.close()


@pytest.mark.parametrize("code", ["engine_busy", "prompt_too_long", "engine_down"])
async def test_no_event_comes_before_a_refusal(code: str) -> None:
    engine = _Engine()
    engine.refusal = TokenEvent(request_id="r", finish="error", refused=code, error="no")
    engine.admits.set()
    with pytest.raises(BackendRefused, match="no") as refused:
        await anext(HandleBackend(Handle(engine.answer), wait_s=5.0, replay_wait_s=0.3).generate(REQUEST))  # type: ignore[arg-type]
    assert refused.value.code == code


@given(st.permutations(range(4)))
def test_an_event_that_only_confirms_takes_nothing_from_those_beside_it(order: list[int]) -> None:
    """It may arrive before or after the first tokens, which another thread sends."""
    empty = TokenEvent(request_id="r")
    parts = [empty, empty, TokenEvent(request_id="r", tokens=[1], cached_tokens=3), empty]
    queue: asyncio.Queue[TokenEvent] = asyncio.Queue()
    first, *rest = (parts[at] for at in order)
    for event in rest:
        queue.put_nowait(event)
    assert _joined(first, queue) == parts[2]
    for event in (empty, TokenEvent(request_id="r", tokens=[2], cached_tokens=3, finish="stop"), empty):
        queue.put_nowait(event)
    both = _joined(parts[2], queue)
    assert (both.tokens, both.cached_tokens, both.finish) == ([1, 2], 3, "stop")
    assert _joined(empty, asyncio.Queue()) == empty


class _Lost:
    """A handle whose only replica is gone: Ray's own words for that are about its parts, over many lines."""

    def options(self, method_name: str) -> _Lost:
        return self

    def broadcast(self, _method: str) -> _Lost:
        return self

    async def results_async(self, **_limits: object) -> list[object]:
        return [RayActorError()]


async def test_health_names_what_was_lost_and_does_not_quote_ray() -> None:
    health = await HandleBackend(_Lost(), wait_s=1, replay_wait_s=1).health()  # type: ignore[arg-type]
    assert (health.ok, health.reason) == (False, "a replica does not answer: RayActorError")


class _Answering:
    """A handle whose replicas answer with these healths (None: healthy)."""

    def __init__(self, *answers: object) -> None:
        self._answers = list(answers)

    def options(self, method_name: str) -> _Answering:
        return self

    def broadcast(self, _method: str) -> _Answering:
        return self

    async def results_async(self, **_limits: object) -> list[object]:
        return self._answers


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([None, None, None], Health(True, "", 3)),
        ([None, None], Health(True, "2 of 3 replicas can serve; the others are not running", 2)),
        ([None, "rank 1 died", None], Health(True, "2 of 3 replicas can serve: rank 1 died", 2)),
        ([RayActorError(), None], Health(True, "1 of 3 replicas can serve: a replica does not answer: RayActorError", 1)),
        (["rank 1 died"], Health(False, "rank 1 died", 0)),
        ([], Health(False, "no engine replica is running", 0)),
    ],
)
async def test_health_says_which_replicas_are_missing(answers: list[object], expected: Health) -> None:
    assert await HandleBackend(_Answering(*answers), 3, wait_s=1, replay_wait_s=1).health() == expected  # type: ignore[arg-type]
