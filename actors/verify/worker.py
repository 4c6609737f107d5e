"""A worker process of the pool, which runs one rank after another."""

from __future__ import annotations

from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from actors.engine.link.link import LinkClosed, LinkError, LinkTimeout
from actors.rank.assembly import assemble_parts, identity_of, load_decoder
from actors.rank.connect_groups import connect
from actors.rank.stepping import close_groups, run_plans
from actors.verify.recorder import Recorder
from actors.verify.routes import Routes, replay
from actors.verify.wire import (
    BYE,
    DONE,
    FAILED,
    PLAN,
    QUIT,
    READY,
    RECORDS,
    RESULT,
    START,
    TAKE,
    Start,
    pack_records,
    unpack_start,
)
from actors.wire.experts import ExpertReport
from actors.wire.kv import KVReport
from actors.wire.plans import StepPlan
from actors.wire.results import StepResult


def work(pipe: Connection) -> None:
    """Run the ranks that the pool starts by messages over `pipe`, one after another, until a `QUIT` message or the end of the
    pool. The target of a worker process. A rank's errors are reported over the pipe, not raised."""
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while (message := pipe.recv_bytes())[:1] != QUIT:
            if message[:1] == START:  # any other message was meant for a rank that has failed
                _be_a_rank(pipe, *unpack_start(message[1:]))
                pipe.send_bytes(DONE)


def _be_a_rank(pipe: Connection, start: Start, routes: Routes | None) -> None:
    config, link = start.config, _PipeLink(pipe)
    torch.set_num_threads(config.threads_per_rank or 1)
    try:
        groups = connect(config.spec, config.layout, config.world_rank, config.device, start.rendezvous)
    except Exception as error:
        link.send_failure(f"{type(error).__name__}: {error}")
        return
    try:
        identity = identity_of(config)
        decoder = load_decoder(config, identity, groups)
        parts = assemble_parts(config, identity, groups, decoder, start.num_blocks)
        if routes is not None:
            replay(parts, routes)
        parts = link.recorder.attach(parts)
    except Exception as error:
        link.send_failure(f"{type(error).__name__}: {error}")
        close_groups(groups)
        return
    pipe.send_bytes(READY)
    with suppress(Exception):  # the failure has been reported over the pipe
        run_plans(parts, link)


class _PipeLink:
    """A `PlanLink` over the pipe, which also answers requests for the records."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.recorder = Recorder()

    def receive_plan(self, timeout_s: float) -> StepPlan:
        """See `PlanLink.receive_plan`. Requests for records are answered meanwhile. Raises `LinkError` on any other message."""
        while self._pipe.poll(timeout_s):
            message = self._pipe.recv_bytes()
            if message[:1] == PLAN:
                return StepPlan.unpack(message[1:])
            if message[:1] == BYE:
                raise LinkClosed("the pool has ended this rank")
            if message[:1] != TAKE:
                raise LinkError(f"a rank received a message of the unexpected kind {message[:1]!r}")
            self._pipe.send_bytes(RECORDS + pack_records(self.recorder.take()))
        raise LinkTimeout(f"no plan within {timeout_s:g} s")

    def send_result(self, result: StepResult) -> None:
        """See `PlanLink.send_result`."""
        self._pipe.send_bytes(RESULT + result.pack())

    def send_busy(self, stage: int, seconds: float) -> None:
        """See `PlanLink.send_busy`. Does nothing: stage times are not measured."""

    def send_experts(self, report: ExpertReport) -> None:
        """See `PlanLink.send_experts`. Does nothing: no plan requests expert reports."""

    def send_kv(self, report: KVReport) -> None:
        """See `PlanLink.send_kv`. Does nothing: there are no hand-offs."""

    def send_failure(self, reason: str) -> None:
        """See `PlanLink.send_failure`."""
        self._pipe.send_bytes(FAILED + reason.encode("utf-8", "replace"))

    def close(self) -> None:
        """See `PlanLink.close`. Does nothing: the worker keeps the pipe for its next rank."""
