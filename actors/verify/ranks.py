"""Ranks that run the step plans of a test case and return what each rank recorded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from actors.engine.link.link import LinkError
from actors.rank.assembly import Parts
from actors.rank.threads import ThreadRanks
from actors.verify.recorder import Recorder, StepRecord
from actors.verify.routes import Routes, replay
from actors.wire.plans import StepPlan
from actors.wire.rank_config import RankConfig
from actors.wire.results import StepResult

STEP_S = 60.0
"""Seconds after which a step without a result counts as stuck."""


@dataclass(frozen=True)
class Ran:
    """The outcome of a list of plans: the joined results of the output ranks, and the records of every rank by world rank."""

    results: list[StepResult]
    records: list[list[StepRecord]]


class WatchedRanks(Protocol):
    """The ranks of one replica, with their hidden states and logits recorded."""

    def run(self, plans: Sequence[StepPlan]) -> Ran:
        """Run `plans` in order, with as many in flight as there are PP stages, and return the results and all records since the
        last call. The plans get new step numbers, which continue over calls. Raises `LinkError` if a rank fails or a step takes
        over 60 s."""

    def close(self) -> None:
        """End the ranks of this replica. `run` must not be called again."""


StartRanks = Callable[[RankConfig, int, Routes | None], WatchedRanks]
"""Starts the ranks of a replica. The arguments are the config of any rank, the number of KV blocks of each rank, and the expert
routes to replay, or None if each rank routes its tokens itself."""


class WatchedThreads:
    """`WatchedRanks` as threads of this process.

    `tamper` may replace the parts of a rank before they are recorded, to inject a bug or to record more.
    """

    def __init__(
        self,
        config: RankConfig,
        num_blocks: int,
        routes: Routes | None = None,
        tamper: Callable[[Parts], Parts] = lambda parts: parts,
    ) -> None:
        self._recorders = [Recorder() for _ in range(config.layout.world)]
        self._in_flight = config.layout.pp
        self._done = threading.Condition()
        self._counts = [0] * config.layout.world
        self._sent = 0

        def attach(parts: Parts) -> Parts:
            rank = parts.config.world_rank
            if routes is not None:
                replay(parts, routes)
            return self._recorders[rank].attach(tamper(parts), lambda: self._count(rank))

        self._ranks = ThreadRanks(config, num_blocks, attach, timeout_s=STEP_S)

    def run(self, plans: Sequence[StepPlan]) -> Ran:
        """See `WatchedRanks.run`."""
        results = flow(plans, self._sent, self._in_flight, self._ranks.send, lambda: self._ranks.receive(STEP_S))
        self._sent += len(plans)
        self._wait_for_all()
        return Ran(results, [recorder.take() for recorder in self._recorders])

    def close(self) -> None:
        """See `WatchedRanks.close`."""
        self._ranks.close()

    def _count(self, rank: int) -> None:
        with self._done:
            self._counts[rank] += 1
            self._done.notify_all()

    def _wait_for_all(self) -> None:
        """Wait until all ranks have finished the last step; the result of an output rank says nothing about the other ranks."""
        deadline = time.monotonic() + STEP_S
        with self._done:
            while late := [rank for rank, count in enumerate(self._counts) if count < self._sent]:
                if not self._done.wait(deadline - time.monotonic()):
                    raise LinkError(f"ranks {late} have not finished step {self._sent - 1} after {STEP_S:g} s")


def flow(
    plans: Sequence[StepPlan],
    first_step: int,
    in_flight: int,
    send: Callable[[StepPlan], None],
    receive: Callable[[], StepResult],
) -> list[StepResult]:
    """Pass a copy of each plan to `send`, with at most `in_flight` plans not answered yet, and return what `receive` returned
    for each, in order. In the copies, `step` counts from `first_step` on, and `settled` is the last step answered so far.
    """
    results: list[StepResult] = []
    for number, plan in enumerate(plans):
        if number - len(results) >= in_flight:
            results.append(receive())
        send(plan.model_copy(update={"step": first_step + number, "settled": first_step + len(results) - 1}))
    while len(results) < len(plans):
        results.append(receive())
    return results
