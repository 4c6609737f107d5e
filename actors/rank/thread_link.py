"""The in-process link between an engine, or any other sender of plans, and ranks that are threads of the same process.

The link consists of queues. Plans are shared, not copied: they are frozen values, and a rank copies what it keeps.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Sequence

from actors.engine.link.link import LinkClosed, LinkError, LinkTimeout
from actors.engine.link.result_joiner import ResultJoiner
from actors.wire.experts import ExpertReport
from actors.wire.kv import KVReport
from actors.wire.plans import StepPlan
from actors.wire.results import StepResult

_POLL_S = 0.001
"""Seconds between two polls of a sender that waits for reports of KV transfers."""


class ThreadLink:
    """The engine's end: a `RankLink` to `world` threads, each of which uses the end that `end(rank)` returns."""

    def __init__(self, world: int, output_ranks: Sequence[int]) -> None:
        """Create the link. `output_ranks` holds, for each DP rank, the world rank that sends its results."""
        self._plans: list[queue.SimpleQueue[StepPlan | None]] = [queue.SimpleQueue() for _ in range(world)]
        self._answers: queue.SimpleQueue[tuple[int, StepResult] | str] = queue.SimpleQueue()
        self._joiner = ResultJoiner(output_ranks)
        self.busy_s: dict[int, float] = {}
        self.reports: deque[ExpertReport] = deque()
        self.kv_reports: deque[KVReport] = deque()

    def end(self, world_rank: int) -> ThreadLinkEnd:
        """Return the link's end for the thread of the rank with world rank `world_rank`."""
        return ThreadLinkEnd(world_rank, self._plans[world_rank], self._answers, self)

    def send(self, plan: StepPlan) -> None:
        """See `RankLink.send`. Never raises."""
        for plans in self._plans:
            plans.put(plan)

    def receive(self, timeout_s: float) -> StepResult:
        """See `RankLink.receive`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                late = f"thread ranks {self._joiner.missing} of {len(self._plans)}"
                raise LinkTimeout(f"no result from {late} within {timeout_s:g} s") from None
            if isinstance(answer, str):
                raise LinkError(answer)
            result = self._joiner.add(*answer)
            if result is not None:
                return result

    def listen(self, timeout_s: float) -> None:
        """See `RankLink.listen`. Never raises: the failure of a rank is raised by `receive`."""
        deadline = time.monotonic() + timeout_s
        while not self.kv_reports and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def close(self) -> None:
        """See `RankLink.close`."""
        for plans in self._plans:
            plans.put(None)


class ThreadLinkEnd:
    """A rank's end: a `PlanLink`."""

    def __init__(
        self,
        world_rank: int,
        plans: queue.SimpleQueue[StepPlan | None],
        answers: queue.SimpleQueue[tuple[int, StepResult] | str],
        link: ThreadLink,
    ) -> None:
        self._world_rank, self._plans, self._answers, self._link = world_rank, plans, answers, link

    def receive_plan(self, timeout_s: float) -> StepPlan:
        """See `PlanLink.receive_plan`."""
        try:
            plan = self._plans.get(timeout=timeout_s)
        except queue.Empty:
            raise LinkTimeout(f"thread rank {self._world_rank}: no plan within {timeout_s:g} s") from None
        if plan is None:
            raise LinkClosed(f"thread rank {self._world_rank}: the link was closed")
        return plan

    def send_result(self, result: StepResult) -> None:
        """See `PlanLink.send_result`."""
        self._answers.put((self._world_rank, result))

    def send_busy(self, stage: int, seconds: float) -> None:
        """See `PlanLink.send_busy`."""
        self._link.busy_s[stage] = seconds

    def send_experts(self, report: ExpertReport) -> None:
        """See `PlanLink.send_experts`."""
        self._link.reports.append(report)

    def send_kv(self, report: KVReport) -> None:
        """See `PlanLink.send_kv`."""
        self._link.kv_reports.append(report)

    def send_failure(self, reason: str) -> None:
        """See `PlanLink.send_failure`."""
        self._answers.put(f"rank {self._world_rank} failed: {reason}")

    def close(self) -> None:
        """See `PlanLink.close`. Does nothing: this end holds no resources."""
