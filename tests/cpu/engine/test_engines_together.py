"""Engines that start at one instant on one host meet their own ranks only, at the first try, whatever ports are taken.

Eight processes, two ranks for each of four engines, meet at a barrier and connect as the ranks of a replica do; ten times.
Field report: a port looked for first and bound later let workers join the store of another engine.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import pytest
import torch

from actors.groups.distributed.rendezvous import serve_store
from actors.rank.connect_groups import connect
from actors.wire.rank_config import Rendezvous
from placement.layout.layout import Layout
from tests.support.models.specs import DENSE

ENGINES, TP, ROUNDS = 4, 2, 10
WAIT_S = 60.0
USUAL_PORT = 29500
"""What torch's own rendezvous prefers."""
LAYOUT = Layout(tp=TP)

Met = list[tuple[int, int]]
"""(engine, process) of each rank of a group, in rank order."""


def work(engine: int, rank: int, pipe: Connection, together: Barrier) -> None:
    """One rank. In each round it is given its engine's name and says what it met; the first rank publishes the port."""
    torch.set_num_threads(1)
    # torch asks for the name of every peer: a name server that drops questions costs five seconds each time, unless told.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    for name in iter(pipe.recv, None):
        together.wait(WAIT_S)
        try:
            served = serve_store(name) if rank == 0 else None
            if served is not None:
                pipe.send(served[1])
            pipe.send(met(engine, rank, name, pipe.recv()))
            pipe.recv()  # the first rank's store lives until all of its engine are done
        except Exception as error:
            pipe.send(f"engine {engine} rank {rank}: {error!r}")
            return


def met(engine: int, rank: int, name: str, port: int) -> Met:
    """Who is in this rank's group, over gloo: nothing but the nodes' names says that they are apart."""
    hosts = ("127.0.0.1",) * TP
    rendezvous = Rendezvous(token=name, nodes=("a", "b"), hosts=hosts, store_port=port, timeout_s=WAIT_S)
    group = connect(DENSE, LAYOUT, rank, "cpu", rendezvous)["tp"]
    found = group.all_gather(torch.tensor([[engine, os.getpid()]])).tolist()
    group.close()
    return [(who, process) for who, process in found]


class Crowd:
    """The ranks of all engines, each a process."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # torch is loaded once
        self._together = context.Barrier(ENGINES * TP)  # gone with its last reference here
        self.processes, self.pipes = [], []
        for index in range(ENGINES * TP):
            here, there = context.Pipe()
            process = context.Process(target=work, args=(*divmod(index, TP), there, self._together), daemon=True)
            process.start()
            self.processes.append(process)
            self.pipes.append(here)

    def round(self, turn: int) -> tuple[list[int], list[Met]]:
        """Everybody connects at once: the ports of the engines' stores, and whom each rank has met."""
        for index, pipe in enumerate(self.pipes):
            pipe.send(f"engine{index // TP}.{turn}")
        ports = [self._receive(index) for index in range(0, ENGINES * TP, TP)]
        for index, pipe in enumerate(self.pipes):
            pipe.send(ports[index // TP])
        found = [self._receive(index) for index in range(ENGINES * TP)]
        for pipe in self.pipes:
            pipe.send("done")
        return ports, found

    def own(self, index: int) -> Met:
        """Whom a rank is to meet."""
        engine = index // TP
        return [(engine, each.pid or 0) for each in self.processes[engine * TP : (engine + 1) * TP]]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def _receive(self, index: int) -> object:
        assert self.pipes[index].poll(WAIT_S), f"process {index} says nothing"
        received = self.pipes[index].recv()
        assert not isinstance(received, str), received
        return received


@pytest.fixture(scope="module")
def crowd() -> Iterator[Crowd]:
    made = Crowd()
    yield made
    made.close()


def test_each_meets_its_own_ranks_only_ten_times(crowd: Crowd) -> None:
    for turn in range(ROUNDS):
        ports, found = crowd.round(turn)
        assert len({*ports}) == ENGINES
        assert min(ports) >= 1024
        assert found == [crowd.own(index) for index in range(ENGINES * TP)]
    assert all(process.is_alive() for process in crowd.processes), "nobody needed a second try"


def test_ports_that_others_hold_are_nobodys_concern(crowd: Crowd) -> None:
    """The usual one is taken, and so are those of the round before: a store lives until its engine has a new one."""
    before, _ = crowd.round(ROUNDS)
    with socket.socket() as taken:
        with suppress(OSError):  # somebody else has it
            taken.bind(("127.0.0.1", USUAL_PORT))
            taken.listen()
        ports, found = crowd.round(ROUNDS + 1)
    assert not {*ports} & {USUAL_PORT, *before}
    assert found == [crowd.own(index) for index in range(ENGINES * TP)]
