"""Stands for the Serve handle of a pool: replicas that a test names, and what it has them answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from actors.engine.link.token_stream import ReplyTo
from actors.wire.requests import GenerateRequest
from actors.wire.roles import Role
from cluster.replica.roles import ReplicaRole, RoleReport

Answer = Callable[[GenerateRequest, ReplyTo, str], Any]


class Handle:
    """`answer` is called for each request, with the name of the replica it is for; what it returns is awaited."""

    def __init__(self, answer: Answer, **roles: Role) -> None:
        self.asked: list[tuple[GenerateRequest, dict[str, Any]]] = []
        self.calls: list[asyncio.Task[Any]] = []
        self.replica_roles = {name: ReplicaRole(name, role) for name, role in roles.items()}
        self.ongoing: Mapping[str, int] = {}
        self.down: dict[str, str] = {}
        self.answer = answer

    def options(self, method_name: str) -> Handle:
        assert method_name == "generate"
        return self

    def remote(self, packed: bytes, reply_to: bytes, **how: Any) -> asyncio.Task[Any]:
        request = GenerateRequest.unpack(packed)
        self.asked.append((request, how))
        name = how.get("preferred_replica") or next(iter(self.replica_roles), "")
        self.calls.append(asyncio.ensure_future(self.answer(request, ReplyTo.unpack(reply_to), name)))
        return self.calls[-1]

    def broadcast(self, method: str, *arguments: Any) -> Handle:
        self._reports = [self._control(name, method, arguments) for name in self.replica_roles]
        return self

    async def results_async(self, **_limits: Any) -> list[Any]:
        return self._reports

    def _control(self, name: str, method: str, arguments: tuple[Any, ...]) -> RoleReport | None:
        replica_role = self.replica_roles[name]
        if method == "change_role":
            wanted, role, within_s = arguments
            if wanted != name:
                return None
            replica_role.change(Role(role), within_s)
        report = replica_role.report(self.down.get(name))
        return report.model_copy(update={"ongoing": self.ongoing.get(name, report.ongoing)})
