"""What a replica of a pool takes: prompts of which others decode, whole requests, or both; and how that changes at run time.

    prefill   prompts          change ──→ refuses what the new role does not take ──none of that is left──→ the new role
    decode    requests                         └──deadline──→ the old role
    mixed     both

Every engine of a pool can do all of it, so a role is only about what is let in.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict

from actors.engine.admission import RequestRefused
from actors.wire.roles import Role, WorkKind


class WrongRole(RequestRefused):
    """A replica is asked for what it is not for, or will not be for soon. Another one may be."""

    code = "wrong_role"


class RoleReport(BaseModel):
    """How it stands with a replica. Times in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    role: Role
    becomes: Role | None = None
    """The role it takes once nothing is left of what that one does not take."""
    waits_for: dict[WorkKind, int] = {}
    """What is left of it."""
    left_s: float = 0.0
    """Until the change is given up."""
    gave_up: str | None = None
    """Why the last change did not happen."""
    ongoing: int = 0
    """Prompts and requests it has now."""
    down: str | None = None
    """Why it can serve nothing now."""

    @property
    def admits(self) -> frozenset[WorkKind]:
        """What it lets in: while it changes, only what both roles take."""
        return self.role.admits & (self.becomes or self.role).admits

    def __str__(self) -> str:
        waits = f" after {counted(self.waits_for)}" if self.waits_for else ""
        return str(self.role) if self.becomes is None else f"{self.role}, becoming {self.becomes}{waits}"


class ReplicaRole:
    """The role of one replica, and what it has to do. Not thread-safe: one event loop calls it."""

    def __init__(self, name: str, role: Role, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._role, self._clock = name, role, clock
        self._becomes: Role | None = None
        self._ends_s = 0.0
        self._gave_up: str | None = None
        self._ongoing = Counter[WorkKind]()

    @property
    def ongoing(self) -> int:
        """Prompts and requests that were let in and have not ended."""
        return self._ongoing.total()

    @property
    def role(self) -> Role:
        self._settle()
        return self._role

    def admit(self, work: WorkKind, is_fallback: bool = False) -> None:
        """Let one in. Raises `WrongRole`.

        `is_fallback`: it is asked for a whole request since nobody whose role it is can answer; it may, unless it is changing.
        """
        report = self.report()
        if work not in report.admits and not (is_fallback and report.becomes is None):
            becoming = "" if report.becomes is None else f", becoming {report.becomes}"
            raise WrongRole(
                f"replica {self._name} is {report.role}{becoming}, and takes {_listed(report.admits)}, "
                f"not a {work}: ask another"
            )
        self._ongoing[work] += 1

    def release(self, work: WorkKind) -> None:
        """One has ended."""
        self._ongoing[work] -= 1
        self._settle()

    def change(self, role: Role, within_s: float) -> None:
        """Take `role` as soon as nothing is left of what it does not take, if that is within so many seconds.

        Another change in progress is forgotten; the role it has already ends that one and is no change.
        """
        self._settle()
        self._becomes = None if role is self._role else role
        self._ends_s, self._gave_up = self._clock() + within_s, None
        self._settle()

    def report(self, down: str | None = None) -> RoleReport:
        """Where it stands. `down`: why it can serve nothing."""
        self._settle()
        return RoleReport(
            name=self._name,
            role=self._role,
            becomes=self._becomes,
            waits_for=self._left(),
            left_s=max(0.0, self._ends_s - self._clock()) if self._becomes else 0.0,
            gave_up=self._gave_up,
            ongoing=self.ongoing,
            down=down,
        )

    def _left(self) -> dict[WorkKind, int]:
        """What is still here of what the new role does not take."""
        new = self._becomes or self._role
        unwanted = self._role.admits - new.admits
        return {work: self._ongoing[work] for work in sorted(unwanted) if self._ongoing[work]}

    def _settle(self) -> None:
        if self._becomes is None:
            return
        left = self._left()
        if not left:
            self._role, self._becomes = self._becomes, None
        elif self._clock() >= self._ends_s:
            self._gave_up = f"it still had {counted(left)} when its time to become {self._becomes} was over"
            self._becomes = None


def counted(left: dict[WorkKind, int]) -> str:
    """``3 requests``, ``1 prompt and 2 requests``."""
    return " and ".join(f"{count} {work}{'' if count == 1 else 's'}" for work, count in left.items())


def _listed(admits: frozenset[WorkKind]) -> str:
    return " and ".join(f"{work}s" for work in sorted(admits)) or "nothing new"
