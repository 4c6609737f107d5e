"""A request whose client goes away is given up whenever that happens, also in the turn in which a replica takes it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from actors.wire.requests import GenerateRequest, SamplingParams, TokenEvent
from serve_app.routing.handle_backend import HandleBackend

REQUEST = GenerateRequest(request_id="r", prompt=[1], max_tokens=4, sampling=SamplingParams())


@pytest.mark.parametrize("turns", range(5))
async def test_a_cancellation_that_comes_with_the_first_event_is_not_lost(turns: int) -> None:
    backend = HandleBackend(SimpleNamespace(options=lambda method_name: None), wait_s=5.0)  # type: ignore[arg-type]
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
    backend = HandleBackend(SimpleNamespace(options=lambda method_name: None), wait_s=0.05)  # type: ignore[arg-type]
    with pytest.raises(Exception, match=r"no engine replica could take the request for 0\.05 s"):
        await backend._taken(REQUEST, asyncio.Queue())


class _Lost:
    """A handle whose only replica is gone: Ray's own words for that are about its parts, over many lines."""

    def options(self, method_name: str) -> _Lost:
        return self

    def broadcast(self, _method: str) -> _Lost:
        return self

    async def results_async(self, **_limits: object) -> list[object]:
        return [RayActorError()]


async def test_health_names_what_was_lost_and_does_not_quote_ray() -> None:
    health = await HandleBackend(_Lost(), 1).health()  # type: ignore[arg-type]
    assert (health.ok, health.reason) == (False, "a replica does not answer: RayActorError")
