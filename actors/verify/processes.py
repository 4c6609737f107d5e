"""Recorded ranks as processes on this machine, over real process groups and without Ray.

A pool of worker processes is started once and reused for one layout after another, because importing torch takes longer than
verifying most layouts.

    pool ──START config, rendezvous──→ worker r: connect, load, run plans ... BYE, then it waits for the next START
         ──PLAN────────────────────→             to every rank
         ←─RESULT──────────────────              from the output rank of each DP rank
         ──TAKE──→  ←─RECORDS──────              the records of the rank, as safetensors
         ←─FAILED text─────────────              from any rank that cannot continue
"""

from __future__ import annotations

import multiprocessing
import secrets
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Self

from actors.engine.link.link import LinkError
from actors.engine.link.result_joiner import joined
from actors.groups.distributed.rendezvous import serve_store
from actors.verify.ranks import STEP_S, Ran, WatchedRanks, flow
from actors.verify.routes import Routes
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
    pack_start,
    unpack_records,
)
from actors.verify.worker import work
from actors.wire.plans import StepPlan
from actors.wire.rank_config import RankConfig, Rendezvous
from actors.wire.results import StepResult
from placement.layout import mesh

_START_S = 120.0
_QUIT_S = 10.0


class Workers:
    """A pool of `count` worker processes, each of which runs one rank at a time. A context manager: leaving it ends them."""

    def __init__(self, count: int) -> None:
        # The fork server imports torch once for all workers. It runs no threads, so forking it is safe.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["actors.verify.worker"])
        self._pipes: list[Connection] = []
        self.processes = []
        for number in range(count):
            here, there = context.Pipe()
            process = context.Process(target=work, args=(there,), name=f"verify-{number}", daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def start(self, config: RankConfig, num_blocks: int, routes: Routes | None = None) -> WatchedRanks:
        """Start the ranks of `config.layout` on the first workers, with `num_blocks` KV blocks each, and return them once all
        are ready. Close them before the next start. `routes` are expert routes to replay, None if the ranks route tokens
        themselves.

        Raises `LinkError` if a rank cannot start or is not ready within 120 s, and `ValueError` if there are too few workers.
        """
        world = config.layout.world
        if world > len(self._pipes):
            raise ValueError(f"{config.layout} needs {world} ranks, but there are {len(self._pipes)} workers")
        return _ProcessRanks(self._pipes[:world], config, num_blocks, routes)

    def close(self) -> None:
        """End the worker processes, and kill those that do not end within 10 s. Further calls do nothing."""
        for pipe in self._pipes:
            if not pipe.closed:
                with suppress(OSError):  # the worker may have ended already
                    pipe.send_bytes(QUIT)
                pipe.close()
        for process in self.processes:
            process.join(_QUIT_S)
            if process.is_alive():
                process.kill()
                process.join()


class _ProcessRanks:
    """`WatchedRanks` on workers of the pool."""

    def __init__(self, pipes: Sequence[Connection], config: RankConfig, num_blocks: int, routes: Routes | None) -> None:
        self._inbox, self._sent = _Inbox(pipes), 0
        self._pipes, self._in_flight, self._output_ranks = pipes, config.layout.pp, mesh.output_ranks(config.layout)
        token, local = f"verify{secrets.token_hex(6)}", ("127.0.0.1",) * config.layout.world
        self._store, port = serve_store(token)
        rendezvous = Rendezvous(token=token, nodes=local, hosts=local, store_port=port)
        for rank, pipe in enumerate(pipes):
            start = Start(config=config.model_copy(update={"world_rank": rank}), rendezvous=rendezvous, num_blocks=num_blocks)
            _post(pipe, rank, START + pack_start(start, routes))
        try:
            for rank in range(len(pipes)):
                self._inbox.next(rank, READY, _START_S)
        except LinkError:
            self.close()
            raise

    def run(self, plans: Sequence[StepPlan]) -> Ran:
        """See `WatchedRanks.run`."""
        results = flow(plans, self._sent, self._in_flight, self._send, self._receive)
        self._sent += len(plans)
        for rank, pipe in enumerate(self._pipes):
            _post(pipe, rank, TAKE)
        records = [unpack_records(self._inbox.next(rank, RECORDS, STEP_S)) for rank in range(len(self._pipes))]
        return Ran(results, records)

    def close(self) -> None:
        """See `WatchedRanks.close`. Frees the workers for other ranks. A rank that has failed has ended already and ignores the
        message."""
        for rank, pipe in enumerate(self._pipes):
            with suppress(LinkError):
                _post(pipe, rank, BYE)
        for rank in range(len(self._pipes)):
            with suppress(LinkError):
                self._inbox.last(rank, _QUIT_S)

    def _send(self, plan: StepPlan) -> None:
        data = PLAN + plan.pack()
        for rank, pipe in enumerate(self._pipes):
            _post(pipe, rank, data)

    def _receive(self) -> StepResult:
        return joined(
            {
                output_rank: StepResult.unpack(self._inbox.next(output_rank, RESULT, STEP_S))
                for output_rank in self._output_ranks
            }
        )


def _post(pipe: Connection, rank: int, data: bytes) -> None:
    try:
        pipe.send_bytes(data)
    except OSError as error:
        raise LinkError(f"rank {rank} failed: its process has ended") from error


class _Inbox:
    """Queues of the messages that the ranks have sent, in order for each rank."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes
        self._messages: list[deque[bytes]] = [deque() for _ in pipes]

    def next(self, rank: int, kind: bytes, timeout_s: float) -> bytes:
        """Returns the body of the next message of `rank`, without its first byte, which must be `kind`. Raises `LinkError` once
        any rank has failed or ended, if the message is of another kind, or if none comes within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self._messages[rank]:
            self._read(deadline, f"rank {rank} sent nothing (a message {kind!r} was due) within {timeout_s:g} s")
            for other, messages in enumerate(self._messages):
                if messages and messages[-1][:1] == FAILED:
                    raise LinkError(f"rank {other} failed: {messages[-1][1:].decode('utf-8', 'replace')}")
        message = self._messages[rank].popleft()
        if message[:1] != kind:
            raise LinkError(f"rank {rank} sent {message[:1]!r} where {kind!r} was due")
        return message[1:]

    def last(self, rank: int, timeout_s: float) -> None:
        """Read messages until `rank` reports that it has ended. Raises `LinkError` if it does not within `timeout_s`, or a
        worker process ends."""
        deadline = time.monotonic() + timeout_s
        while not (self._messages[rank] and self._messages[rank][-1] == DONE):
            self._read(deadline, f"rank {rank} did not end within {timeout_s:g} s")

    def _read(self, deadline: float, late: str) -> None:
        ready = wait(self._pipes, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise LinkError(late)
        for rank, pipe in enumerate(self._pipes):
            if pipe in ready:
                try:
                    self._messages[rank].append(pipe.recv_bytes())
                except (EOFError, OSError):
                    raise LinkError(f"rank {rank} failed: its process has ended") from None
