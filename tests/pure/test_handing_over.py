"""What an ingress does with a ticket, and with a decode pool that is down: fake handles, real events over ZeroMQ."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from ray.exceptions import RayActorError

from actors.engine.token_stream import ReplyTo, TokenReceiver, TokenSender
from actors.messages import GenerateRequest, KVTicket, TokenEvent
from serve_app.handing_over import PrefillPool
from serve_app.handle_backend import HandleBackend

WAIT_S = 5.0


class Handle:
    """Stands for a Serve handle. `answer` is called for each request; what it returns is awaited."""

    def __init__(self, answer: Callable[[GenerateRequest, ReplyTo, tuple[str, ...]], Any]) -> None:
        self.asked: list[tuple[GenerateRequest, tuple[str, ...]]] = []
        self.calls: list[asyncio.Task[Any]] = []
        self._answer = answer

    def options(self, method_name: str) -> Handle:
        assert method_name == "generate"
        return self

    def remote(self, packed: bytes, reply_to: bytes, avoid: tuple[str, ...] = ()) -> asyncio.Task[Any]:
        request = GenerateRequest.unpack(packed)
        self.asked.append((request, avoid))
        self.calls.append(asyncio.ensure_future(self._answer(request, ReplyTo.unpack(reply_to), avoid)))
        return self.calls[-1]


@asynccontextmanager
async def decode_side() -> AsyncIterator[tuple[KVTicket, asyncio.Queue[TokenEvent]]]:
    """A ticket, and what is said of it."""
    said: asyncio.Queue[TokenEvent] = asyncio.Queue()
    receiver = TokenReceiver.listen("127.0.0.1", said.put_nowait)
    fields: dict[str, Any] = {"layout": "", "page_tokens": 16, "lane": 0, "blocks": [0], "first": 0, "tokens": 3}
    more = {"rope_length": 3, "readers": [], "lease_s": 9.0, "reply_to": receiver.reply_to.pack()}
    try:
        yield KVTicket(ticket_id="r~0", **fields, **more), said
    finally:
        receiver.close()


REQUEST = GenerateRequest(request_id="r", prompt=[1, 2, 3], max_tokens=4, reserves=True)


def refusal(request: GenerateRequest, code: str, name: str) -> bytes:
    return TokenEvent(request_id=request.request_id, finish="error", refused=code, refused_by=name, error="why").pack()


async def test_the_prefill_replica_gets_the_request_under_the_tickets_name() -> None:
    async def takes(request: GenerateRequest, to: ReplyTo, avoid: tuple[str, ...]) -> None:
        return None

    async with decode_side() as (ticket, said):
        handle = Handle(takes)
        await PrefillPool(handle).run(REQUEST, ticket)
        [(asked, _)] = handle.asked
        assert (asked.request_id, asked.ticket, asked.reserves, asked.max_tokens) == ("r~0", ticket, False, 4)
        assert said.empty()


async def test_a_replica_that_is_down_is_passed_over_and_a_refusal_is_told() -> None:
    async def refuses(request: GenerateRequest, to: ReplyTo, avoid: tuple[str, ...]) -> bytes:
        names = [name for name in ("one", "two") if name not in avoid]
        return refusal(request, "engine_down", names[0] if names else "one")

    async with decode_side() as (ticket, said):
        handle = Handle(refuses)
        await PrefillPool(handle).run(REQUEST, ticket)
        assert [avoid for _, avoid in handle.asked] == [(), ("one",), ("one", "two")]
        event = await asyncio.wait_for(said.get(), WAIT_S)
        assert (event.request_id, event.refused) == ("r~0", "engine_down")  # so nobody writes into the blocks


async def test_a_replica_that_dies_is_told_of_as_one_that_may_still_write() -> None:
    async def dies(request: GenerateRequest, to: ReplyTo, avoid: tuple[str, ...]) -> None:
        raise RayActorError()

    async with decode_side() as (ticket, said):
        await PrefillPool(Handle(dies)).run(REQUEST, ticket)
        event = await asyncio.wait_for(said.get(), WAIT_S)
        assert (event.finish, event.refused) == ("error", None)
        assert "the prefill replica was lost" in event.error


async def test_a_request_that_ends_gives_its_prompt_up() -> None:
    async def computes(request: GenerateRequest, to: ReplyTo, avoid: tuple[str, ...]) -> None:
        await asyncio.sleep(WAIT_S)

    async with decode_side() as (ticket, said):
        handle = Handle(computes)
        running = asyncio.create_task(PrefillPool(handle).run(REQUEST, ticket))
        for _ in range(5):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running, *handle.calls], timeout=1)
        assert handle.calls[0].cancelled()
        assert said.empty()


async def _reached(sender: TokenSender, to: ReplyTo) -> None:
    while not sender.connected(to):  # noqa: ASYNC110 - a socket has no event to wait for
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("max_tokens", [0, 4])
async def test_tokens_come_from_the_decode_side_and_tickets_go_to_the_other(max_tokens: int) -> None:
    sender = TokenSender()

    async def decodes(request: GenerateRequest, to: ReplyTo, avoid: tuple[str, ...]) -> None:
        await _reached(sender, to)
        name, events = request.request_id, list[TokenEvent]()
        if request.reserves:
            events.append(TokenEvent(request_id=name, ticket=ticket))
            events.append(TokenEvent(request_id=name, tokens=[8]))
        for event in (TokenEvent(request_id=name), *events, TokenEvent(request_id=name, finish="length")):
            sender.send(to, event)
            sender.flush()
            await asyncio.sleep(0.02)  # a step

    async def computes(request: GenerateRequest, to: ReplyTo, avoid: tuple[str, ...]) -> None:
        return None

    async with decode_side() as (ticket, _):
        prefill = Handle(computes)
        backend = HandleBackend(Handle(decodes), WAIT_S, prefill)  # type: ignore[arg-type]
        request = REQUEST.model_copy(update={"reserves": False, "max_tokens": max_tokens})
        events = [event async for event in backend.generate(request)]
        assert [token for event in events for token in event.tokens] == ([8] if max_tokens else [])
        assert [event.ticket for event in events] == [None] * len(events)
        assert len(prefill.asked) == (1 if max_tokens else 0)
    sender.close()


async def test_without_a_decode_pool_the_prefill_pool_does_everything() -> None:
    sender = TokenSender()

    async def down(request: GenerateRequest, to: ReplyTo, avoid: tuple[str, ...]) -> bytes:
        return refusal(request, "engine_down", "decode")

    async def serves(request: GenerateRequest, to: ReplyTo, avoid: tuple[str, ...]) -> None:
        await _reached(sender, to)
        sender.send(to, TokenEvent(request_id=request.request_id, tokens=[3], finish="length"))
        sender.flush()

    prefill = Handle(serves)
    backend = HandleBackend(Handle(down), WAIT_S, prefill)  # type: ignore[arg-type]
    events = [event async for event in backend.generate(REQUEST.model_copy(update={"reserves": False}))]
    assert [event.tokens for event in events] == [[3]]
    [(asked, _)] = prefill.asked
    assert (asked.request_id, asked.reserves, asked.ticket) == ("r", False, None)
    sender.close()
