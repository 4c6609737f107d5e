"""What an ingress does with a ticket, and with replicas that are down: fake handles, real events over ZeroMQ."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import RayActorError

from actors.engine.link.token_stream import ReplyTo, TokenReceiver, TokenSender
from actors.wire.kv import KVTicket
from actors.wire.requests import GenerateRequest, TokenEvent
from actors.wire.roles import Role
from serve_app.deployment.deployment_names import ENGINE, PREFILL
from serve_app.routing.backend import BackendRefused
from serve_app.routing.handoff import PrefillReplicas
from serve_app.routing.pool_members import PoolMembers
from serve_app.routing.pooled_backend import PooledBackend
from tests.support.handles import Handle

WAIT_S = 5.0


@asynccontextmanager
async def decode_side() -> AsyncIterator[tuple[KVTicket, asyncio.Queue[TokenEvent]]]:
    """A ticket, and what is said of it."""
    reports: asyncio.Queue[TokenEvent] = asyncio.Queue()
    receiver = TokenReceiver.listen("127.0.0.1", reports.put_nowait)
    fields: dict[str, Any] = {"layout": "", "page_tokens": 16, "dp_rank": 0, "blocks": [0], "first": 0, "tokens": 3}
    more = {"rope_length": 3, "readers": [], "lease_s": 9.0, "reply_to": receiver.reply_to.pack()}
    try:
        yield KVTicket(ticket_id="r~0", **fields, **more), reports
    finally:
        receiver.close()


REQUEST = GenerateRequest(request_id="r", prompt=[1, 2, 3], max_tokens=4, reserves=True)


async def run_handoff(handle: Handle, ticket: KVTicket) -> list[str | None]:
    """What is told of how it ended."""
    ended: list[str | None] = []
    pool_members = PoolMembers({PREFILL: handle})  # type: ignore[dict-item]
    await pool_members.refresh()
    await PrefillReplicas(pool_members).run(REQUEST, ticket, "the decode replica", ended.append)
    return ended


def refusal(request: GenerateRequest, code: str, name: str) -> bytes:
    return TokenEvent(request_id=request.request_id, finish="error", refused=code, refused_by=name, error="why").pack()


async def test_the_prefill_replica_gets_the_request_under_the_tickets_name() -> None:
    async def takes(request: GenerateRequest, to: ReplyTo, replica: str) -> None:
        return None

    async with decode_side() as (ticket, reports):
        handle = Handle(takes, one=Role.PREFILL)
        assert await run_handoff(handle, ticket) == [None]
        [(asked, _)] = handle.asked
        assert (asked.request_id, asked.ticket, asked.reserves, asked.max_tokens) == ("r~0", ticket, False, 4)
        assert reports.empty()


@pytest.mark.parametrize("code", ["engine_down", "wrong_role"])
async def test_a_replica_that_refuses_is_passed_over_and_the_last_refusal_is_told(code: str) -> None:
    async def refuses(request: GenerateRequest, to: ReplyTo, replica: str) -> bytes:
        return refusal(request, code, replica)

    async with decode_side() as (ticket, reports):
        handle = Handle(refuses, one=Role.PREFILL, two=Role.MIXED, three=Role.DECODE)
        assert await run_handoff(handle, ticket) == ["no other replica takes prompts"]
        assert {how["preferred_replica"] for _, how in handle.asked} == {"one", "two"}
        event = await asyncio.wait_for(reports.get(), WAIT_S)
        assert (event.request_id, event.refused) == ("r~0", "engine_down")  # so nobody writes into the blocks


async def test_a_replica_that_dies_is_told_of_as_one_that_may_still_write() -> None:
    async def dies(request: GenerateRequest, to: ReplyTo, replica: str) -> None:
        raise RayActorError()

    async with decode_side() as (ticket, reports):
        assert await run_handoff(Handle(dies, one=Role.PREFILL), ticket) == ["the prefill replica one was lost: RayActorError"]
        event = await asyncio.wait_for(reports.get(), WAIT_S)
        assert (event.finish, event.refused) == ("error", None)
        assert "the prefill replica one was lost" in event.error


async def test_what_a_replica_has_told_itself_is_not_told_again() -> None:
    """It stopped writing, and says why: the ingress learns of the fault, the decode side has."""

    async def fails(request: GenerateRequest, to: ReplyTo, replica: str) -> bytes:
        return TokenEvent(request_id=request.request_id, finish="abort", error="model digests differ: a and b").pack()

    async with decode_side() as (ticket, reports):
        assert await run_handoff(Handle(fails, one=Role.PREFILL), ticket) == ["model digests differ: a and b"]
        assert reports.empty()


async def test_a_request_that_ends_gives_its_prompt_up() -> None:
    async def computes(request: GenerateRequest, to: ReplyTo, replica: str) -> None:
        await asyncio.sleep(WAIT_S)

    async with decode_side() as (ticket, reports):
        handle = Handle(computes, one=Role.PREFILL)
        running = asyncio.create_task(run_handoff(handle, ticket))
        while not handle.calls:  # noqa: ASYNC110 - nothing tells of a call
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running, *handle.calls], timeout=1)
        assert handle.calls[0].cancelled()
        assert reports.empty()


async def _reached(sender: TokenSender, to: ReplyTo) -> None:
    while not sender.connected(to):  # noqa: ASYNC110 - a socket has no event to wait for
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("max_tokens", [0, 4])
async def test_tokens_come_from_the_decode_side_and_tickets_go_to_the_other(max_tokens: int) -> None:
    sender = TokenSender()

    async def decodes(request: GenerateRequest, to: ReplyTo, replica: str) -> None:
        await _reached(sender, to)
        name, events = request.request_id, list[TokenEvent]()
        if request.reserves:
            events.append(TokenEvent(request_id=name, ticket=ticket.model_copy(update={"ticket_id": f"{name}~0"})))
            events.append(TokenEvent(request_id=name, tokens=[8]))
        for event in (TokenEvent(request_id=name), *events, TokenEvent(request_id=name, finish="length")):
            sender.send(to, event)
            sender.flush()
            await asyncio.sleep(0.02)  # a step

    async def computes(request: GenerateRequest, to: ReplyTo, replica: str) -> None:
        return None

    async with decode_side() as (ticket, _):
        prefill = Handle(computes, b=Role.PREFILL)
        async with backend_over(Handle(decodes, a=Role.DECODE), prefill) as backend:
            request = REQUEST.model_copy(update={"reserves": False, "max_tokens": max_tokens})
            events = [event async for event in backend.generate(request)]
        assert [token for event in events for token in event.tokens] == ([8] if max_tokens else [])
        assert [event.ticket for event in events] == [None] * len(events)
        own = [asked for asked, _ in prefill.asked if not asked.request_id.startswith("trial-")]
        assert len(own) == (1 if max_tokens else 0)
    sender.close()


@pytest.mark.parametrize("is_there", [True, False], ids=["down", "gone"])
async def test_without_a_decode_pool_the_prefill_pool_does_everything(is_there: bool) -> None:
    sender = TokenSender()

    async def down(request: GenerateRequest, to: ReplyTo, replica: str) -> bytes:
        return refusal(request, "engine_down", "decode")

    async def serves(request: GenerateRequest, to: ReplyTo, replica: str) -> None:
        await _reached(sender, to)
        sender.send(to, TokenEvent(request_id=request.request_id, tokens=[3], finish="length"))
        sender.flush()

    prefill = Handle(serves, b=Role.PREFILL)
    async with backend_over(Handle(down, **({"decode": Role.DECODE} if is_there else {})), prefill) as backend:
        events = [event async for event in backend.generate(REQUEST.model_copy(update={"reserves": False}))]
    assert [event.tokens for event in events] == [[3]]
    [(asked, how)] = [each for each in prefill.asked if each[0].request_id == "r"]
    assert (asked.reserves, asked.ticket, how) == (False, None, {"preferred_replica": "b", "is_fallback": True})
    sender.close()


async def test_every_other_replica_is_asked_before_a_request_is_refused() -> None:
    async def refuses(request: GenerateRequest, to: ReplyTo, replica: str) -> bytes:
        return refusal(request, "wrong_role", replica)

    decode, prefill = Handle(refuses, a=Role.DECODE, b=Role.MIXED), Handle(refuses, c=Role.PREFILL)
    async with backend_over(decode, prefill) as backend:
        with pytest.raises(BackendRefused) as refused:
            await anext(backend.generate(REQUEST))
    assert refused.value.code == "engine_down"
    assert {how.get("preferred_replica") for asked, how in decode.asked + prefill.asked if asked.request_id == "r"} == {
        "a",
        "b",
        "c",
        None,
    }


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.sampled_from("abcdefg"), st.sampled_from(Role), min_size=2))
def test_no_replica_waits_for_itself_by_way_of_others(roles: dict[str, Role]) -> None:
    """Who may ask whom has no circle, and a decode replica may ask all that take prompts."""

    async def asked() -> PoolMembers:
        pool_members = PoolMembers({ENGINE: Handle(lambda *_: None, **roles)})  # type: ignore[dict-item]
        await pool_members.refresh()
        return pool_members

    pool_members = asyncio.run(asked())
    asks = {
        name: {each.name for each in pool_members.able_for(name)} for name, role in roles.items() if role is not Role.PREFILL
    }
    prompts = {name for name, role in roles.items() if role is not Role.DECODE}
    assert all(asks[name] == prompts for name, role in roles.items() if role is Role.DECODE)
    list(TopologicalSorter(asks).static_order())  # raises where there is a circle
    mixed = sorted(name for name, role in roles.items() if role is Role.MIXED)
    assert all(asks[one] >= {other} for one, other in pairwise(mixed))


@pytest.mark.parametrize(("others", "least_prefill_load"), [({"b": 3, "c": 2}, 2), ({"b": 0, "c": 2}, 0), ({}, None)])
async def test_a_request_says_what_there_is_to_do_elsewhere(others: dict[str, int], least_prefill_load: int | None) -> None:
    """By which a mixed replica knows whether to hand off its prompt; where there is no other, there is nobody to do so."""
    asked = asyncio.Event()

    async def waits(request: GenerateRequest, to: ReplyTo, replica: str) -> None:
        if request.request_id == "r":
            asked.set()
        await asyncio.sleep(WAIT_S)

    mixed = Handle(waits, a=Role.MIXED)
    prefill = Handle(waits, **dict.fromkeys(others, Role.PREFILL))
    prefill.ongoing = others
    async with backend_over(mixed, prefill) as backend:
        await backend.roles()
        running = asyncio.ensure_future(anext(backend.generate(REQUEST.model_copy(update={"reserves": False}))))
        await asyncio.wait_for(asked.wait(), WAIT_S)
        running.cancel()
    [(request, how)] = [each for each in mixed.asked if each[0].request_id == "r"]
    assert (request.reserves, how["least_prefill_load"] if others else None) == (bool(others), least_prefill_load)


@asynccontextmanager
async def backend_over(decode: Handle, prefill: Handle) -> AsyncIterator[PooledBackend]:
    """A backend whose watch ends with the block."""
    backend = PooledBackend({ENGINE: decode, PREFILL: prefill}, wait_s=WAIT_S, replay_wait_s=WAIT_S)  # type: ignore[dict-item]
    try:
        yield backend
    finally:
        if backend._watch is not None:
            backend._watch.cancel()
