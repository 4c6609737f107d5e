"""The members of the pools and the work they accept now: the replicas' last reports, and the requests that this process has
sent."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ray.serve.handle import DeploymentHandle

from actors.wire.roles import Role, WorkKind
from cluster.replica.roles import RoleReport
from serve_app.routing.broadcast import broadcast

_FRESH_S = 0.2
"""Seconds during which a report counts as fresh and is not requested again."""


@dataclass(frozen=True)
class PoolMember:
    """One replica: the name of its pool, and its report."""

    pool: str
    report: RoleReport

    @property
    def name(self) -> str:
        """The name of the replica."""
        return self.report.name


class PoolMembers:
    """The replicas behind some handles, by pool. It is used from one event loop."""

    def __init__(self, pools: Mapping[str, DeploymentHandle[Any]]) -> None:
        self.pools = dict(pools)
        self._generates: dict[str, Any] = {name: pool.options(method_name="generate") for name, pool in pools.items()}
        self._members: dict[str, PoolMember] = {}
        self._given = Counter[str]()
        self._asking = asyncio.Lock()
        self._asked_at: float | None = None

    def __iter__(self) -> Iterator[PoolMember]:
        return iter(sorted(self._members.values(), key=lambda each: (each.pool, each.name)))

    @property
    def is_known(self) -> bool:
        """Whether the replicas have been asked for their reports at all."""
        return self._asked_at is not None

    async def refresh(self, at_once: bool = False) -> None:
        """Ask all replicas for their reports; unless `at_once`, only if the last reports are older than 0.2 s.

        Replicas that do not answer are removed, except that a pool with an answer that comes too late (after 5 s) keeps its
        members.
        """
        async with self._asking:
            if not at_once and self._asked_at is not None and time.monotonic() - self._asked_at < _FRESH_S:
                return
            answers = await asyncio.gather(*(broadcast(handle, "role_report") for handle in self.pools.values()))
            self._asked_at = time.monotonic()
            for pool, reports in zip(self.pools, answers, strict=True):
                if not any(isinstance(each, TimeoutError) for each in reports):
                    self._replace(pool, [each for each in reports if isinstance(each, RoleReport)])

    def _replace(self, pool: str, reports: list[RoleReport]) -> None:
        others = {name: member for name, member in self._members.items() if member.pool != pool}
        self._members = others | {each.name: PoolMember(pool, each) for each in reports}

    def able(self, work: WorkKind, excluded: Collection[str] = ()) -> list[PoolMember]:
        """Returns the healthy replicas that accept this kind of work now, according to their last reports, by pool and name.
        `excluded` are names of replicas to leave out."""
        return [each for each in self if work in each.report.admits and each.report.down is None and each.name not in excluded]

    def able_for(self, name: str, excluded: Collection[str] = ()) -> list[PoolMember]:
        """Returns the replicas that can compute prompts which the replica `name` then decodes. `excluded` are names of replicas
        to leave out.

        A mixed replica asks only those mixed ones whose names come after its own. Reserved blocks here wait for blocks there;
        in a circle of full replicas, each would otherwise wait for the next until the leases expire.
        """
        able, own = self.able(WorkKind.PROMPT, [name, *excluded]), self._members.get(name)
        if own is None or own.report.role is not Role.MIXED:
            return able
        return [each for each in able if each.report.role is Role.PREFILL or each.name > name]

    def least_busy(self, members: Collection[PoolMember]) -> PoolMember | None:
        """Returns one of the `members` with the lowest `load`, chosen at random; None if there are no members."""
        least = min(map(self.load, members), default=0)
        return random.choice([each for each in members if self.load(each) == least]) if members else None

    def generate(self, member: PoolMember) -> Any:
        """Returns the Serve handle of the method `Replica.generate` in the pool of `member`; the call's ``preferred_replica``
        selects the replica."""
        return self._generates[member.pool]

    def load(self, member: PoolMember) -> int:
        """Returns the number of prompts and requests in progress on a replica: the number it reported or the number sent from
        here, whichever is larger."""
        return max(member.report.ongoing, self._given[member.name])

    @contextmanager
    def giving(self, name: str) -> Iterator[None]:
        """Returns a context manager that counts one more request on the replica `name`, for `load`, until its end."""
        self._given[name] += 1
        try:
            yield
        finally:
            self._given[name] -= 1
            if not self._given[name]:
                del self._given[name]
