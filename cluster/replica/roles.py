"""Replica roles of prefill/decode disaggregation: which work a replica admits, and how its role changes at run time.

    prefill   prompts          change ──→ refuses work that the new role does not take ──none of it is left──→ the new role
    decode    requests                         └──deadline──→ the old role
    mixed     both

A prompt is prefilled here and decoded by another replica; a request is run as a whole. Every engine can do both, so a role only
governs admission.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict

from actors.engine.admission import RequestRefused
from actors.wire.roles import Role, WorkKind


class WrongRole(RequestRefused):
    """Raised when a replica refuses work that its role, or the role it is changing to, does not take. Another replica may take
    it."""

    code = "wrong_role"


class RoleReport(BaseModel):
    """The role of a replica, and the progress of a role change. Times are in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    role: Role
    becomes: Role | None = None
    """The role that the replica changes to once it has no work left that this role does not take; None: no change."""
    waits_for: dict[WorkKind, int] = {}
    """Number of pieces of such work left, by kind."""
    left_s: float = 0.0
    """Seconds until the change is given up."""
    gave_up: str | None = None
    """The reason why the last change was given up."""
    ongoing: int = 0
    """Number of prompts and requests in progress."""
    down: str | None = None
    """The reason why the replica cannot serve anything at present."""

    @property
    def admits(self) -> frozenset[WorkKind]:
        """The kinds of work that the replica admits; during a role change, only those that both roles take."""
        return self.role.admits & (self.becomes or self.role).admits

    def __str__(self) -> str:
        waits = f" after {counted(self.waits_for)}" if self.waits_for else ""
        return str(self.role) if self.becomes is None else f"{self.role}, becoming {self.becomes}{waits}"


class ReplicaRole:
    """The role of one replica, and its work in progress. Not thread-safe: one event loop calls it."""

    def __init__(self, name: str, role: Role, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._role, self._clock = name, role, clock
        self._becomes: Role | None = None
        self._ends_s = 0.0
        self._gave_up: str | None = None
        self._ongoing = Counter[WorkKind]()

    @property
    def ongoing(self) -> int:
        """Number of prompts and requests that were admitted and have not ended."""
        return self._ongoing.total()

    @property
    def role(self) -> Role:
        """The current role."""
        self._settle()
        return self._role

    def admit(self, work: WorkKind, is_fallback: bool = False) -> None:
        """Admit one prompt or request and count it as work in progress, until `release`.

        `is_fallback` means that no replica with the right role can answer. The replica then admits the work regardless of its
        role, unless the role is changing. Raises `WrongRole` otherwise, if the current or the coming role does not take such
        work.
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
        """Record that one prompt or request which `admit` has counted has ended. This may complete a role change."""
        self._ongoing[work] -= 1
        self._settle()

    def change(self, role: Role, within_s: float) -> None:
        """Change to `role` as soon as no work in progress is left that it does not take; give up after `within_s` seconds.
        Returns at once: see `report`.

        Meanwhile only work that both roles take is admitted. A new change replaces one in progress. A change to the current
        role only cancels one in progress.
        """
        self._settle()
        self._becomes = None if role is self._role else role
        self._ends_s, self._gave_up = self._clock() + within_s, None
        self._settle()

    def report(self, down: str | None = None) -> RoleReport:
        """Returns the current role and the progress of a change. `down` is the reason why the replica cannot serve (None: it
        can), which is copied into the report."""
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
        """Returns the number of pieces of work in progress that the new role does not take, by kind."""
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
    """Returns the counts of work in `left` as text, as in ``3 requests`` or ``1 prompt and 2 requests``; empty if there is
    none."""
    return " and ".join(f"{count} {work}{'' if count == 1 else 's'}" for work, count in left.items())


def _listed(admits: frozenset[WorkKind]) -> str:
    return " and ".join(f"{work}s" for work in sorted(admits)) or "nothing new"
