"""Prompts are tried to be handed off before the service is ready, and again when something is amiss: replicas are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from actors.engine.link.token_stream import ReplyTo, TokenReceiver, TokenSender
from actors.wire.kv import KVTicket
from actors.wire.requests import GenerateRequest, TokenEvent
from actors.wire.roles import Role, WorkKind
from serve_app.deployment.deployment_names import ENGINE, PREFILL
from serve_app.routing import handoff_probe
from serve_app.routing.backend import BackendRefused, Health
from serve_app.routing.pool_members import PoolMembers
from serve_app.routing.pooled_backend import PooledBackend
from serve_app.routing.role_change import RoleRefused, change_role
from tests.support.handles import Handle

WAIT_S = 5.0
REQUEST = GenerateRequest(request_id="r", prompt=[1, 2, 3], max_tokens=4)
UNLIKE = "its model_digest is aa, here it is bb"


class Pair:
    """A decode replica that gives tickets and a prefill replica with a fault, or none, and the backend before them."""

    def __init__(self, require_prefill: bool, wait_s: float = WAIT_S) -> None:
        self.fault: str | None = None
        self.decode, self.prefill = Handle(self._decode, a=Role.DECODE), Handle(self._prefill, b=Role.PREFILL)
        self._sender = TokenSender()
        self._notified: dict[str, asyncio.Event] = {}
        self._receiver = TokenReceiver.listen("127.0.0.1", lambda event: self._notified[event.request_id].set())
        pools = {ENGINE: self.decode, PREFILL: self.prefill}
        self.backend = PooledBackend(pools, require_prefill, wait_s=wait_s, replay_wait_s=wait_s)  # type: ignore[arg-type]

    async def _decode(self, request: GenerateRequest, to: ReplyTo, replica: str) -> None:
        while not self._sender.connected(to):  # noqa: ASYNC110 - a socket has no event to wait for
            await asyncio.sleep(0.001)
        name = request.request_id
        self._send(to, TokenEvent(request_id=name))
        if request.reserves:
            ticket = KVTicket(
                **{"ticket_id": f"{name}~0", "layout": "", "page_tokens": 16, "dp_rank": 0, "blocks": [0], "first": 0},
                **{"tokens": 3, "rope_length": 3, "readers": [], "lease_s": 9.0, "reply_to": self._receiver.reply_to.pack()},
            )
            self._notified[ticket.ticket_id] = asyncio.Event()
            self._send(to, TokenEvent(request_id=name, ticket=ticket))
            await self._notified[ticket.ticket_id].wait()
        self._send(to, TokenEvent(request_id=name, tokens=[7], finish="length"))

    async def _prefill(self, request: GenerateRequest, to: ReplyTo, replica: str) -> bytes | None:
        self._notified[request.request_id].set()
        if self.fault is None:
            return None
        return TokenEvent(request_id=request.request_id, finish="abort", error=self.fault).pack()

    def _send(self, to: ReplyTo, event: TokenEvent) -> None:
        self._sender.send(to, event)
        self._sender.flush()

    async def ask(self) -> list[int]:
        return [token async for event in self.backend.generate(REQUEST) for token in event.tokens]

    async def until(self, what: Callable[[Health], bool]) -> Health:
        async with asyncio.timeout(WAIT_S):
            while not what(found := await self.backend.health()):  # noqa: ASYNC110 - what health says has no event
                await asyncio.sleep(0.01)
        return found


@asynccontextmanager
async def pair(require_prefill: bool = False, wait_s: float = WAIT_S) -> AsyncIterator[Pair]:
    found = Pair(require_prefill, wait_s)
    try:
        yield found
    finally:
        if found.backend._watch is not None:
            found.backend._watch.cancel()
        found._receiver.close()
        found._sender.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff_probe, "_LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(handoff_probe, "_TRY_EVERY_S", 0.1)
    monkeypatch.setattr("serve_app.routing.pool_members._FRESH_S", 0.0)


async def test_nothing_is_ready_before_a_prompt_was_handed_off() -> None:
    async with pair() as both:
        both.prefill.down["b"] = "starting"
        assert await both.backend.health() == Health(False, f"prompts are not handed off: {handoff_probe.NOT_TRIED}", 1)
        assert both.backend.gauges()["handoff_works"] == 0.0
        both.prefill.down.clear()
        await both.backend.started()
        assert await both.backend.health() == Health(True, "", 1)
        assert both.backend.gauges()["handoff_works"] == 1.0
        [(asked, how)] = both.prefill.asked
        assert (asked.ticket.ticket_id, how["preferred_replica"]) == (asked.request_id, "b")
        assert both.decode.asked[0][1]["least_prefill_load"] < 0  # a mixed replica would have it computed elsewhere, too


@pytest.mark.parametrize("require_prefill", [False, True])
async def test_a_trial_that_fails_is_told_and_tried_again(require_prefill: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with pair(require_prefill) as both:
        both.fault = UNLIKE
        await both.backend.started()
        assert await both.backend.health() == Health(not require_prefill, f"prompts are not handed off: {UNLIKE}", 1)
        assert UNLIKE in caplog.text
        assert both.backend.gauges()["handoff_works"] == 0.0
        if require_prefill:
            with pytest.raises(BackendRefused, match=UNLIKE) as refused:
                await both.ask()
            assert refused.value.code == "engine_down"
        else:
            assert await both.ask() == [7]
        both.fault = None
        assert await both.until(lambda found: not found.reason) == Health(True, "", 1)
        assert await both.ask() == [7]


@pytest.mark.parametrize("require_prefill", [False, True])
async def test_prefill_fails_on_the_third_of_ten_and_then_altogether(require_prefill: bool) -> None:
    """C05. Once is no verdict: the next trial goes well. When the pool is gone nobody waits for it."""
    async with pair(require_prefill) as both:
        await both.backend.started()
        for number in range(10):
            both.fault = "it raised" if number == 2 else None
            assert await asyncio.wait_for(both.ask(), WAIT_S) == [7]
        assert (await both.backend.health()).reason == ""
        both.prefill.replica_roles.clear()
        found = await both.until(lambda found: "handed off" in found.reason)
        assert found == Health(not require_prefill, "prompts are not handed off: no other replica takes prompts", 1)
        asked = len(both.prefill.asked)
        for _ in range(5):
            if require_prefill:
                with pytest.raises(BackendRefused, match="no other replica takes prompts"):
                    await asyncio.wait_for(both.ask(), WAIT_S)
            else:
                assert await asyncio.wait_for(both.ask(), WAIT_S) == [7]
        assert len(both.prefill.asked) == asked


async def test_a_fault_of_one_prompt_calls_for_a_trial_at_once() -> None:
    async with pair() as both:
        await both.backend.started()
        both.fault = "it broke"
        await both.ask()
        assert (await both.until(lambda found: bool(found.reason))).reason == "prompts are not handed off: it broke"


async def test_a_prefill_pool_that_never_comes_is_a_verdict() -> None:
    async with pair(wait_s=0.1) as both:
        both.prefill.replica_roles.clear()
        await asyncio.wait_for(both.backend.started(), WAIT_S)
        assert await both.backend.health() == Health(True, "prompts are not handed off: no other replica takes prompts", 1)


async def test_the_last_replica_that_takes_requests_keeps_its_role() -> None:
    async with pair() as both:
        pool_members = PoolMembers({ENGINE: both.decode, PREFILL: both.prefill})  # type: ignore[dict-item]
        message = r"if replica a became prefill, 0 of 2 replicas would take requests: the others are b \(prefill\)"
        with pytest.raises(RoleRefused, match=message):
            await change_role(pool_members, "a", Role.PREFILL, 9.0, [WorkKind.REQUEST])
        with pytest.raises(RoleRefused, match=r"no replica 'c'; there are a \(decode\), b \(prefill\)"):
            await change_role(pool_members, "c", Role.MIXED, 9.0, [WorkKind.REQUEST])
        assert (await change_role(pool_members, "b", Role.MIXED, 9.0, [WorkKind.REQUEST])).role is Role.MIXED
        assert (await change_role(pool_members, "a", Role.PREFILL, 9.0, [WorkKind.REQUEST])).role is Role.PREFILL
        with pytest.raises(RoleRefused, match="0 of 2 replicas would take requests"):
            await change_role(pool_members, "b", Role.PREFILL, 9.0, [WorkKind.REQUEST])


async def test_of_two_changes_at_once_that_leave_nobody_none_happens() -> None:
    """Each alone would do; the second is seen by the first when both are under way, and the other way round."""
    async with pair() as both:
        both.prefill.replica_roles["b"].change(Role.DECODE, 9.0)
        pools = {ENGINE: both.decode, PREFILL: both.prefill}
        for handle, name in ((both.decode, "a"), (both.prefill, "b")):
            handle.replica_roles[name].admit(WorkKind.REQUEST)
        changes = [change_role(PoolMembers(pools), name, Role.PREFILL, 9.0, [WorkKind.REQUEST]) for name in "ab"]  # type: ignore[arg-type]
        found = await asyncio.gather(*changes, return_exceptions=True)
        assert any(isinstance(each, RoleRefused) for each in found)
        reports = [handle.replica_roles[name].report() for handle, name in ((both.decode, "a"), (both.prefill, "b"))]
        assert any(WorkKind.REQUEST in each.admits for each in reports)
