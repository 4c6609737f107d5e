"""The interface of the link between an engine and its ranks, which carries step plans to the ranks and results back.

Only the engine's thread uses the engine's end, and only a rank's step loop uses the rank's end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Protocol

from actors.wire.experts import ExpertReport
from actors.wire.kv import KVReport
from actors.wire.plans import StepPlan
from actors.wire.results import StepResult


class LinkError(RuntimeError):
    """Raised if the other side is lost, or sent a message that cannot be decoded."""


class LinkTimeout(LinkError):
    """Raised if nothing arrives in time. The link remains usable."""


class LinkClosed(LinkError):
    """Raised if the other side has closed the link."""


class PlanLink(Protocol):
    """A rank's end of the link."""

    def receive_plan(self, timeout_s: float) -> StepPlan:
        """Return the next plan, after waiting for it. Raises `LinkTimeout` after `timeout_s` seconds, `LinkClosed` if the
        engine has closed the link, and `LinkError` for a message that is no plan."""

    def send_result(self, result: StepResult) -> None:
        """Send the result of a plan, without waiting. Only the output rank of each DP rank calls this."""

    def send_busy(self, stage: int, seconds: float) -> None:
        """Report the total of seconds that a pipeline stage has been busy since the rank started; it replaces earlier reports.

        `stage` numbers the stages of all DP ranks: ``dp_rank * pp + pp_rank``. With several stages, one rank of each calls this
        after every step.
        """

    def send_experts(self, report: ExpertReport) -> None:
        """Send the load of this rank's experts to the engine, after a plan that asked for it."""

    def send_kv(self, report: KVReport) -> None:
        """Send the progress of this rank's KV transfers to the engine. May be called at any time."""

    def send_failure(self, reason: str) -> None:
        """Report to the engine that this rank has failed. The engine's `RankLink.receive` then raises `LinkError` with
        `reason`."""

    def close(self) -> None:
        """Release the resources of the link. Calling this twice is harmless."""


class RankLink(Protocol):
    """The engine's end of the link."""

    @property
    def busy_s(self) -> Mapping[int, float]:
        """Total of seconds that each pipeline stage has reported to be busy, by stage (see `PlanLink.send_busy`); empty with a
        single stage."""

    @property
    def reports(self) -> deque[ExpertReport]:
        """Expert reports of the ranks, oldest first. The reader removes them."""

    @property
    def kv_reports(self) -> deque[KVReport]:
        """KV transfer reports of the ranks, oldest first. The reader removes them."""

    def listen(self, timeout_s: float) -> None:
        """Wait for at most `timeout_s` seconds until `kv_reports` has an entry, while no plan is in flight.

        Raises `LinkError` if the ranks are lost. Returns without an error when the time is over.
        """

    def send(self, plan: StepPlan) -> None:
        """Send `plan` to every rank, without waiting. Raises `LinkError` if a rank is lost or the link is closed."""

    def receive(self, timeout_s: float) -> StepResult:
        """Return the result of the oldest step without one, joined over all DP ranks, after waiting for it.

        Raises `LinkTimeout` after `timeout_s` seconds, and `LinkError` if a rank failed or sent a malformed message. Reports
        that arrive meanwhile are added to `busy_s`, `reports` and `kv_reports`.
        """

    def close(self) -> None:
        """Notify the ranks that the link is closed, and release its resources. Calling this twice is harmless."""
