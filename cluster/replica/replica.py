"""A replica: one engine and the ranks that run its plans, supervised together.

If a rank dies or a step does not return, all ranks are killed. Their requests end with a ``lost`` event each, upon which the
HTTP process replays it, and the ranks are launched again in the same bundles, or in new ones if a node is lost. The process of
the replica itself keeps running.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Collection
from typing import Any

import ray
from ray.util import get_node_ip_address

from actors.engine.admission import RequestRefused
from actors.engine.config.balancing import Balancing
from actors.engine.config.engine_config import CHUNK_TOKENS, POOL_CHUNK_TOKENS, DisaggregationConfig, EngineConfig
from actors.engine.config.options import EngineLimits
from actors.engine.engine import Engine
from actors.engine.link.token_stream import IngressGone, ReplyTo, TokenReceiver, TokenSender
from actors.engine.link.zmq_link import ZmqEngineLink
from actors.wire.requests import GenerateRequest, TokenEvent
from actors.wire.roles import Role, WorkKind
from cluster.replica import launch, placement_group
from cluster.replica.rank_checks import LaunchError
from cluster.replica.roles import ReplicaRole, RoleReport
from cluster.replica.settings import ReplicaSettings
from cluster.replica.tiers import offload_config
from placement.cost import kv_budget, memory
from placement.layout import mesh
from placement.model.spec import DTYPE_BYTES
from placement.ownership.context import BLOCK_TOKENS

log = logging.getLogger("shardwright.replica")

_WATCH_EVERY_S = 0.5
_REACH_S = 10.0
"""Seconds after which a replica gives up connecting to an ingress."""
_REACH_EVERY_S = 0.002
_REBUILDS = 3
"""Number of consecutive failed rebuilds after which the replica gives up and Ray Serve replaces it."""


class Replica:
    """One copy of the model behind one queue. Ray Serve constructs it, and calls `generate`, `health`, `gauges`, `role_report`,
    `change_role` and `check_health`."""

    def __init__(self, settings: ReplicaSettings, name: str) -> None:
        self._settings, self._name = settings, name
        self._closing = threading.Event()
        self._down: str | None = "starting"
        self._dead: str | None = None
        self._role = ReplicaRole(name, settings.role or Role.MIXED)
        self._tokens = TokenSender()
        self._receiver: TokenReceiver | None = None
        self._reserved = placement_group.reserve(settings, _here())
        self._ranks = launch.launch(settings, self._reserved, name)
        self._blocks = _num_blocks(settings, self._ranks)
        link, self._sentinels = self._link()
        self._model_digest = self._ranks.model_digest
        self.engine = Engine(_engine_config(settings, self._blocks, self._model_digest), link, flush=self._tokens.flush)
        self.engine.start()
        self._down = None
        self._watcher = threading.Thread(target=self._watch, name="rank-watcher", daemon=True)
        self._watcher.start()

    async def generate(
        self,
        packed: bytes,
        reply_to: bytes,
        excluded_replicas: Collection[str] = (),
        preferred_replica: str = "",
        least_prefill_load: int = 0,
        is_fallback: bool = False,
    ) -> bytes | None:
        """Run one request: `packed` is a packed `GenerateRequest`. Its events are sent over ZeroMQ to `reply_to`, a packed
        `ReplyTo`; the first one, which is empty, as soon as the engine has admitted the request.

        Returns None when the last event is sent, or when the ingress is gone, in which case the engine drops the request. A
        refused request sends no further events; the refusal is returned as a packed `TokenEvent`. Cancelling the call cancels
        the request. If the KV of a prompt was not handed off, the last event is returned as well as sent.

        `excluded_replicas` are the names of the replicas that have refused the request, and `preferred_replica` is the one that
        should run it; only the routers read these two. `least_prefill_load` is the load (prompts and requests in progress) of
        the least busy other replica that takes prompts; while this replica is mixed and has no higher load, it computes its
        prompts itself. `is_fallback`: whether no replica with the right role can answer, so that this one accepts the request
        regardless of its role.

        Raises `IngressGone` if the replica cannot connect to the ingress in 10 s.
        """
        request, to = GenerateRequest.unpack(packed), ReplyTo.unpack(reply_to)
        work, is_busier = WorkKind.of(request), self._role.ongoing > least_prefill_load
        try:
            self._role.admit(work, is_fallback)
        except RequestRefused as refusal:
            return self._refused(request, refusal).pack()
        try:
            if request.reserves and self._role.role is Role.MIXED and not is_busier:
                request = request.model_copy(update={"reserves": False})
            return await self._run(request, to)
        finally:
            self._role.release(work)

    async def _run(self, request: GenerateRequest, to: ReplyTo) -> bytes | None:
        loop, ended, unsent = asyncio.get_running_loop(), asyncio.Event(), list[TokenEvent]()
        await self._reach(to)
        here = self._listening().pack() if request.reserves else b""

        has_sent = False

        def deliver(event: TokenEvent) -> None:
            nonlocal has_sent
            over = has_sent = True
            if event.ticket is not None:
                event = event.model_copy(update={"ticket": event.ticket.model_copy(update={"reply_to": here})})
            try:
                self._tokens.send(to, event)
                over = event.finish is not None
            finally:
                if request.ticket is not None and event.finish not in (None, "handoff"):
                    unsent.append(event)
                if over:
                    loop.call_soon_threadsafe(ended.set)

        try:
            self.engine.submit(request, deliver)
        except RequestRefused as refusal:
            return self._refused(request, refusal).pack()
        try:
            if not has_sent:  # else the engine was faster, and its event says that the request is admitted
                deliver(TokenEvent(request_id=request.request_id))
                self._tokens.flush()
            await ended.wait()
        finally:
            if not ended.is_set():
                self.engine.cancel(request.request_id)
        return unsent[0].pack() if unsent else None

    def _listening(self) -> ReplyTo:
        """Returns the address to which prefill replicas send the events of this replica's tickets."""
        if self._receiver is None:
            self._receiver = TokenReceiver.listen(get_node_ip_address(), self.engine.on_ticket_event)
        return self._receiver.reply_to

    async def _reach(self, to: ReplyTo) -> None:
        """Connect to an ingress, unless connected already. Raises `IngressGone` if it does not answer in time."""
        deadline = time.monotonic() + _REACH_S
        while not self._tokens.connected(to):
            if time.monotonic() > deadline:
                raise IngressGone(f"replica {self._name} cannot connect to the ingress at {to.address} in {_REACH_S:g} s")
            await asyncio.sleep(_REACH_EVERY_S)

    def _refused(self, request: GenerateRequest, refusal: RequestRefused) -> TokenEvent:
        return TokenEvent(
            request_id=request.request_id,
            finish="error",
            refused=refusal.code,
            refused_by=self._name,
            error=str(refusal),
        )

    def health(self) -> str | None:
        """Returns None if all ranks are alive and a step has finished recently or there is no work, else the reason why the
        replica cannot serve."""
        return self._down or self.engine.healthy()

    def gauges(self) -> tuple[str, dict[str, float]]:
        """Returns the name of this replica, and the current values of its engine's metrics (and of its role, if it is in a
        pool) by metric name, as in ``name`` or ``name:label=value``."""
        found = self.engine.stats().gauges()
        if self._settings.in_pool:
            report = self._role.report()
            found |= {f"role:role={report.role}": 1.0, "role_changing": float(report.becomes is not None)}
        return self._name, found

    async def role_report(self) -> RoleReport:
        """Returns the role of this replica, the progress of a role change, and the reason why it cannot serve, if any."""
        return self._role.report(self.health())

    async def change_role(self, name: str, role: str, within_s: float) -> RoleReport | None:
        """Begin to change the role of this replica to `role` (``prefill``, ``decode`` or ``mixed``) if its name is `name`, else
        return None.

        The change is given up if it takes more than `within_s` seconds; see `ReplicaRole.change`. Returns the report once
        the change has begun. Raises `ValueError` if `role` is no role.
        """
        if name != self._name:
            return None
        self._role.change(Role(role), within_s)
        return await self.role_report()

    def check_health(self) -> None:
        """Return if the replica is alive, even while its ranks restart. Ray Serve calls this health probe, and replaces the
        replica if it raises.

        Raises `RuntimeError` if the ranks could not be restarted, from which this process cannot recover.
        """
        if self._dead is not None:
            raise RuntimeError(self._dead)

    def close(self) -> None:
        """End the engine and all ranks, and free the bundles. Requests in progress end with a ``lost`` event. Raises
        `RuntimeError` if the engine's thread does not end."""
        self._closing.set()
        self.engine.close()
        self._tokens.close()
        self._ranks.kill()
        self._reserved.free()

    def __del__(self) -> None:
        if hasattr(self, "_watcher") and not self._closing.is_set():
            self.close()

    def _link(self) -> tuple[ZmqEngineLink, list[ray.ObjectRef[Any]]]:
        layout, host = self._settings.layout, get_node_ip_address()
        link = ZmqEngineLink(layout.world, mesh.output_ranks(layout), self._ranks.token, f"tcp://{host}:*")
        sentinels = self._ranks.run(link.address, self._blocks)
        link.wait_ready(self._settings.start_timeout_s)
        return link, sentinels

    def _watch(self) -> None:
        while not self._closing.is_set():
            dead, _ = ray.wait(self._sentinels, num_returns=1, timeout=_WATCH_EVERY_S)
            reason = _death(self._sentinels, dead) if dead else self.engine.healthy()
            if reason is not None and not self._closing.is_set():
                self._rebuild(reason)

    def _rebuild(self, reason: str) -> None:
        log.error("ending all ranks of %s: %s", self._name, reason)
        self._down = f"rebuilding ranks: {reason}"
        self.engine.fail(reason)
        self._ranks.kill()
        for _attempt in range(_REBUILDS):
            try:
                if not self._reserved.are_whole():  # a node is lost, and its bundles with it
                    self._reserved.free()
                    self._reserved = placement_group.reserve(self._settings, _here())
                self._ranks = launch.launch(self._settings, self._reserved, self._name)
                self._check_weights()
                link, self._sentinels = self._link()
            except Exception as error:
                log.exception("ranks of %s did not come back", self._name)
                self._down = f"ranks did not come back: {error}"
                continue
            self.engine.restart(link)
            self._down = None
            return
        self._dead = self._down
        self._closing.set()

    def _check_weights(self) -> None:
        """Raise `LaunchError` if ranks that were launched again have loaded other weights: the engine's tiers hold KV of the
        former ones. Serve then replaces the replica."""
        if self._ranks.model_digest != self._model_digest:
            self._ranks.kill()
            raise LaunchError(f"the weights in {self._settings.model_path} are not those that the replica started with")


def _here() -> str:
    """Returns the Ray node id of this process."""
    return str(ray.get_runtime_context().get_node_id())


def _death(sentinels: list[ray.ObjectRef[Any]], dead: list[ray.ObjectRef[Any]]) -> str:
    rank = sentinels.index(dead[0])
    try:
        ray.get(dead[0])
    except ray.exceptions.RayActorError:
        return f"rank {rank} died"
    except ray.exceptions.RayError as error:
        return f"rank {rank} failed: {getattr(error, 'cause', None) or error}"
    return f"rank {rank} ended"


def _num_blocks(settings: ReplicaSettings, ranks: launch.ReplicaRanks) -> int:
    """Returns the number of KV blocks of every rank. Raises `MemoryBudgetError` if the memory does not suffice."""
    gathers = settings.device == "cpu"
    needs = memory.rank_memories(settings.spec, settings.layout, settings.dtype, limits=settings.step_limits, gathers=gathers)
    free = [loaded.free_bytes for loaded in ranks.loaded if loaded.free_bytes is not None]
    return kv_budget.kv_blocks(needs, settings.kv_bytes, free, settings.max_model_len, settings.max_sequences)


def _engine_config(settings: ReplicaSettings, num_blocks: int, model_digest: str) -> EngineConfig:
    limits = {name: getattr(settings, name) for name in EngineLimits.model_fields}
    return EngineConfig(
        **limits,
        block_size=BLOCK_TOKENS,
        num_blocks=num_blocks,
        kv_owners=settings.layout.kv_owners,
        dp_size=settings.layout.attn_dp,
        max_chunk_tokens=POOL_CHUNK_TOKENS if settings.in_pool else CHUNK_TOKENS,
        offload=offload_config(settings, model_digest),
        stages=settings.layout.pp,
        vocab_size=settings.spec.vocab_size,
        rope=settings.spec.rope,
        experts=_balancing(settings),
        disaggregation=DisaggregationConfig(layout=settings.layout) if settings.in_pool else None,
    )


def _balancing(settings: ReplicaSettings) -> Balancing | None:
    asked = (DTYPE_BYTES[settings.dtype], settings.rebalance_every, settings.rebalance_skew)
    return Balancing.of(settings.spec, settings.layout, *asked)
