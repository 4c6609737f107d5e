"""The seam between the engine and its ranks: plans out, results back.

The engine's thread is the only user of its end; a rank's step loop is the only user of the rank's end.
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
    """The other side is lost, or sent what cannot be read."""


class LinkTimeout(LinkError):
    """Nothing arrived in time. The link is as good as before."""


class LinkClosed(LinkError):
    """The other side said goodbye."""


class PlanLink(Protocol):
    """A rank's end."""

    def receive_plan(self, timeout_s: float) -> StepPlan:
        """The next plan. Raises `LinkTimeout` after `timeout_s`, `LinkClosed` when the engine said goodbye."""

    def send_result(self, result: StepResult) -> None:
        """Answer a plan (the output rank of each DP rank only)."""

    def send_busy(self, stage: int, seconds: float) -> None:
        """Tell how long this rank's stage has been busy so far (one rank a stage; the stages in DP rank order)."""

    def send_experts(self, report: ExpertReport) -> None:
        """Tell what this rank's experts did, where a plan asked for it."""

    def send_kv(self, report: KVReport) -> None:
        """Tell how far this rank's hand-offs have come, at any time."""

    def send_failure(self, reason: str) -> None:
        """Tell the engine that this rank cannot go on."""

    def close(self) -> None:
        """Release what the link holds. Calling twice is harmless."""


class RankLink(Protocol):
    """The engine's end."""

    @property
    def busy_s(self) -> Mapping[int, float]:
        """Seconds each pipeline stage has told it was busy so far; a single stage tells nothing."""

    @property
    def reports(self) -> deque[ExpertReport]:
        """What ranks told of their experts, oldest first; whoever reads it takes it out."""

    @property
    def kv_reports(self) -> deque[KVReport]:
        """What ranks told of hand-offs, oldest first; whoever reads it takes it out."""

    def listen(self, timeout_s: float) -> None:
        """Wait until `kv_reports` has one, at most `timeout_s`, while no plan is in flight. Raises `LinkError` as `receive`."""

    def send(self, plan: StepPlan) -> None:
        """Give `plan` to every rank. Returns at once. Raises `LinkError` where a rank is gone."""

    def receive(self, timeout_s: float) -> StepResult:
        """The next result, that of all DP ranks. Raises `LinkTimeout` after `timeout_s`, `LinkError` where the ranks are
        lost."""

    def close(self) -> None:
        """Say goodbye to the ranks and release the socket. Calling twice is harmless."""
