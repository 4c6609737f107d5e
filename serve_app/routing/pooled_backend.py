"""The endpoint's backend over several pools (prefill/decode disaggregation): it chooses replicas by the work they accept, and
hands prompts off.

request ──→ the least busy replica that takes requests ── ticket ──→ the least busy other one that takes prompts
        ──→ if there is none, one that takes prompts, for all of it
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass
from typing import Any

from ray.serve.handle import DeploymentHandle

from actors.wire.kv import KVTicket
from actors.wire.requests import GenerateRequest, SamplingParams
from actors.wire.roles import Role, WorkKind
from cluster.replica.roles import RoleReport
from serve_app.routing import role_change
from serve_app.routing.backend import BackendRefused, Health
from serve_app.routing.handle_backend import HandleBackend, Route
from serve_app.routing.handoff import PrefillReplicas
from serve_app.routing.handoff_probe import HandoffProbe
from serve_app.routing.pool_members import PoolMember, PoolMembers

_FIRST_VERDICT_S = 60.0
"""Seconds after which the HTTP process counts as started even if its pools have not been tried."""
_TRIAL_S = 20.0
_TRIAL_PROMPT = [0] * 16
"""Trial prompt with the minimum length for a hand-off."""
_FROM_ANY = -1
"""Value of `least_prefill_load` for which the prompt is always computed by another replica, however idle this one is."""


@dataclass(frozen=True)
class PooledRoute(Route):
    """A route whose `ended` is called with the result of the prompt's hand-off, if there was one."""

    ended: Callable[[str | None], None] = lambda failure: None


class PooledBackend(HandleBackend):
    """Generates on the replicas of several pools. Requests normally go to the first one."""

    def __init__(
        self,
        pools: Mapping[str, DeploymentHandle[Any]],
        require_prefill: bool = False,
        deployed: int | None = None,
        *,
        wait_s: float,
        replay_wait_s: float,
    ) -> None:
        """`wait_s`, `replay_wait_s` and `deployed` (default: one replica in each pool): see `HandleBackend`. `require_prefill`:
        whether to refuse requests while prompts are not handed off."""
        number = len(pools) if deployed is None else deployed
        super().__init__(next(iter(pools.values())), number, wait_s=wait_s, replay_wait_s=replay_wait_s)
        self._pool_members, self._requires = PoolMembers(pools), require_prefill
        self._prefill = PrefillReplicas(self._pool_members)
        self._handoff_probe = HandoffProbe(is_needed=len(pools) > 1)
        self._watch: asyncio.Task[None] | None = None
        self._known_at: float | None = None
        self._has_waited = False

    async def started(self) -> None:
        """Wait until the first trial hand-off has succeeded or failed, at most 60 s. Later calls return at once. Starts the
        hand-off probe."""
        self._watching()
        if not self._has_waited:
            self._has_waited = True
            await self._handoff_probe.first(_FIRST_VERDICT_S)

    async def health(self) -> Health:
        """See `Backend.health`. Healthy while a replica accepts requests, and the hand-off between the pools has been tried,
        and works or is not required. The reason also says if a hand-off that is not required fails, or else if
        replicas are missing or unhealthy."""
        self._watching()
        await self._pool_members.refresh()
        able = self._pool_members.able(WorkKind.REQUEST)
        if not able:
            downs = [
                each.report.down for each in self._pool_members if each.report.down and WorkKind.REQUEST in each.report.admits
            ]
            return Health(ok=False, reason=next(iter(downs), "no engine replica is running"))
        failure = self._handoff_probe.failure
        ok = self._handoff_probe.is_tried and not (failure and self._requires)
        reasons = [each.report.down for each in self._pool_members]
        shortage = self._shortage(reasons.count(None), next(filter(None, reasons), ""))
        return Health(ok=ok, reason=f"prompts are not handed off: {failure}" if failure else shortage, replicas=len(able))

    def gauges(self) -> Mapping[str, float]:
        """See `Backend.gauges`. Returns also the gauge that shows whether prompts are handed off: ``handoff_works``."""
        return {**super().gauges(), **self._handoff_probe.gauges()}

    async def roles(self) -> list[RoleReport]:
        """Returns the role report of every replica, by pool and name. The replicas are asked unless they have just been."""
        await self._pool_members.refresh()
        return [member.report for member in self._pool_members]

    async def change_role(self, replica: str, role: Role, within_s: float) -> RoleReport:
        """Change the role of the replica named `replica` to `role`, or give up after `within_s` seconds; see
        `role_change.change_role`.

        Returns the state of the change, which goes on after the call. Raises `RoleRefused` if there is no such replica, it does
        not answer, or no replica would be left for a kind of work.
        """
        needed = (WorkKind.REQUEST, WorkKind.PROMPT) if self._requires else (WorkKind.REQUEST,)
        return await role_change.change_role(self._pool_members, replica, role, within_s, needed)

    async def _choose(self, request: GenerateRequest, refused_by: Sequence[str]) -> Route:
        self._watching()
        if refused_by or not self._pool_members.is_known:
            await self._pool_members.refresh()
        if self._requires and self._handoff_probe.failure:
            raise BackendRefused("engine_down", f"prompts are not handed off: {self._handoff_probe.failure}")
        member = self._pool_members.least_busy(self._pool_members.able(WorkKind.REQUEST, refused_by))
        if member is not None:
            return self._by(member, request, self._handoff_probe.on_handoff_end)
        fallback = self._pool_members.least_busy(self._pool_members.able(WorkKind.PROMPT, refused_by))
        if fallback is not None:
            return PooledRoute(
                self._pool_members.generate(fallback),
                request,
                {"preferred_replica": fallback.name, "is_fallback": True},
                fallback.name,
            )
        return PooledRoute(self._generate, request, {"excluded_replicas": tuple(refused_by)})

    def _by(self, member: PoolMember, request: GenerateRequest, ended: Callable[[str | None], None]) -> PooledRoute:
        """Returns the route to a replica that answers, and that has its prompt computed by another one if there is one and it
        is worthwhile."""
        others = [self._pool_members.load(each) for each in self._pool_members.able_for(member.name)]
        if others and request.max_tokens > 0 and not request.generated:
            request = request.model_copy(update={"reserves": True})
        hints = {"preferred_replica": member.name, "least_prefill_load": min(others, default=0)}
        return PooledRoute(self._pool_members.generate(member), request, hints, member.name, ended)

    def _giving(self, route: Route) -> AbstractContextManager[None]:
        return self._pool_members.giving(route.replica)

    def _run_handoff(self, route: Route, ticket: KVTicket) -> Coroutine[Any, Any, None]:
        assert isinstance(route, PooledRoute)
        return self._prefill.run(route.request, ticket, route.replica, route.ended)

    def _pools(self) -> Sequence[DeploymentHandle[Any]]:
        return list(self._pool_members.pools.values())

    def _watching(self) -> None:
        """Start the hand-off probe on the event loop that serves requests, unless it runs."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._handoff_probe.run(self._look, self._attempt))

    async def _look(self) -> str | None:
        """Returns why a hand-off must fail; see `HandoffProbe.run`. At first a pool may still be starting."""
        await self._pool_members.refresh()
        if not self._pool_members.able(WorkKind.REQUEST):
            return None
        self._known_at = self._known_at or time.monotonic()
        if self._pair() is not None:
            return ""
        is_early = not self._handoff_probe.is_tried and time.monotonic() - self._known_at < self._wait_s
        return None if is_early else "no other replica takes prompts"

    def _pair(self) -> PoolMember | None:
        """Returns a replica that accepts requests while another one accepts prompts; None if there is none."""
        able = self._pool_members.able(WorkKind.REQUEST)
        return next((each for each in able if self._pool_members.able_for(each.name)), None)

    async def _attempt(self) -> str:
        """Hand off a trial prompt. Returns the fault, or an empty text."""
        member, name = self._pair(), secrets.token_hex(8)
        if member is None:
            return "no other replica takes prompts"
        ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        sampling = SamplingParams(temperature=0.0)
        request = GenerateRequest(
            request_id=f"trial-{name}", prompt=_TRIAL_PROMPT, max_tokens=2, sampling=sampling, cache_salt=name
        )
        route = self._by(member, request, lambda failure: None if ended.done() else ended.set_result(failure))
        route = PooledRoute(
            route.generate, route.request, {**route.hints, "least_prefill_load": _FROM_ANY}, route.replica, route.ended
        )
        try:
            async with asyncio.timeout(_TRIAL_S):
                return await self._error_of(route) or await ended or ""
        except BackendRefused as refused:
            return refused.message
        except TimeoutError:
            return f"a prompt of {len(_TRIAL_PROMPT)} tokens was not handed off within {_TRIAL_S:g} s"

    async def _error_of(self, route: Route) -> str | None:
        async with aclosing(self._ask(route)) as events:
            errors = [event.error async for event in events]
        return errors[-1] if errors else "it had no events"
