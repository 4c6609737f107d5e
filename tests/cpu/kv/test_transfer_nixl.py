"""The same between spawned processes, over NIXL: shared memory or TCP, as UCX finds them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe

import psutil
import pytest
import torch

from actors.kv_transfer.nixl_transport import NixlTransport, is_installed, nixl_version
from actors.kv_transfer.transport import Ranges, TransferError
from tests.support.kv.transfer_cases import OVER_NIXL, Case, read_over_nixl, write_over_nixl
from tests.support.long_cases import long
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not is_installed(), reason="NIXL is not installed: pip install 'shardwright[pools]'")

_WAIT_S = 60.0


def _receive(pipe: Connection) -> object:
    assert pipe.poll(_WAIT_S), f"nothing came from the other process within {_WAIT_S:g} s"
    return pipe.recv()


@pytest.fixture(scope="module", params=[0, *long(1 << 20)], ids=["pages", "staged"])
def results(request: pytest.FixtureRequest) -> Iterator[dict[str, tuple[object, object]]]:
    """Of every case: what the readers found, and what the writers counted. One pair of processes runs them all."""
    spawn, names = multiprocessing.get_context("spawn"), list(OVER_NIXL)
    (reader, reader_end), (writer, writer_end) = Pipe(), Pipe()
    processes = [
        spawn.Process(target=read_over_nixl, args=(reader_end, names, request.param), daemon=True),
        spawn.Process(target=write_over_nixl, args=(writer_end, names), daemon=True),
    ]
    found = {}
    try:
        for process in processes:
            process.start()
        for name in names:
            writer.send(_receive(reader))
            found[name] = (_receive(reader), _receive(writer))
            writer.send("close")
            reader.send(_receive(writer))
        for process in processes:
            process.join(_WAIT_S)
            assert process.exitcode == 0
        yield found
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_every_value_arrives_between_processes(results: dict[str, tuple[object, object]]) -> None:
    for name in OVER_NIXL:
        case = Case.named(name)
        (arrived, wrong, stray), sent = results[name]
        assert arrived == sorted(f"copy {index}" for index in range(len(case.copies))), name
        assert (wrong, stray) == (0, 0), name
        for rank, num_bytes in sent.items():
            mapped = sum(copy.num_bytes(case.spec, "float32") for copy in case.copies if copy.source == rank)
            assert num_bytes == mapped, name


@pytest.mark.long
def test_an_agent_in_a_forked_process_is_refused() -> None:
    """In a process of its own: this one must not fork after making an agent."""
    result = _result_of(_fork_after_agent)
    assert "a fork of it, where no transfer would ever end: start the process with spawn" in str(result)


def _result_of(child: Callable[[Connection], None]) -> object:
    """The one thing that a spawned process says."""
    pipe, end = Pipe()
    process = multiprocessing.get_context("spawn").Process(target=child, args=(end,), daemon=True)
    process.start()
    result = _receive(pipe)
    process.join(_WAIT_S)
    return result


def _fork_after_agent(pipe: Connection) -> None:
    transport = NixlTransport("forked")
    child = os.fork()
    if child == 0:
        try:
            transport.poll()
            pipe.send("nothing was raised")
        except TransferError as error:
            pipe.send(str(error))
        os._exit(0)
    os.waitpid(child, 0)


def test_a_peer_that_is_killed_is_an_error_and_no_wait() -> None:
    spawn = multiprocessing.get_context("spawn")
    (reader, reader_end), (writer, writer_end) = Pipe(), Pipe()
    killed = spawn.Process(target=_be_written_to, args=(reader_end,), daemon=True)
    writing = spawn.Process(target=_write_twice, args=(writer_end,), daemon=True)
    try:
        killed.start()
        writing.start()
        writer.send(_receive(reader))
        assert _receive(writer) == "first is done"
        killed.kill()
        killed.join()
        writer.send("killed")
        result, seconds = _receive(writer)
        assert "from writer" in result or "to reader" in result
        assert seconds < 10
    finally:
        for process in (killed, writing):
            process.kill()
            process.join()


def _be_written_to(pipe: Connection) -> None:
    transport = NixlTransport("reader")
    transport.register({0: torch.zeros(1 << 20, dtype=torch.uint8)})
    pipe.send(transport.describe())
    pipe.recv()


def _write_twice(pipe: Connection) -> None:
    transport = NixlTransport("writer")
    transport.register({0: torch.zeros(1 << 20, dtype=torch.uint8)})
    peer, everything = transport.connect(pipe.recv()), Ranges.single(0, 0, 0, 0, 1 << 20)
    first = transport.write(peer, everything, b"first")
    while not first.is_done():
        pass
    pipe.send("first is done")
    assert pipe.recv() == "killed"
    began = time.monotonic()
    try:
        second = transport.write(peer, everything, b"second")
        while not second.is_done() and time.monotonic() - began < 20:
            pass
        pipe.send(("nothing was raised", 20.0))
    except TransferError as error:
        pipe.send((str(error), time.monotonic() - began))


@pytest.mark.long
def test_a_peer_that_is_stopped_holds_up_nobody() -> None:
    """It may never answer; the writer goes on with others, lets go of it and ends. (When to:
    `actors.kv_transfer.prompt_sender`.)"""
    spawn = multiprocessing.get_context("spawn")
    pipes = [Pipe() for _ in range(3)]
    readers = [spawn.Process(target=_be_written_to, args=(end,), daemon=True) for _, end in pipes[:2]]
    writing = spawn.Process(target=_write_to_both, args=(pipes[2][1],), daemon=True)
    try:
        for process in (*readers, writing):
            process.start()
        pipes[2][0].send([_receive(pipe) for pipe, _ in pipes[:2]])
        assert _receive(pipes[2][0]) == "both are reached"
        os.kill(readers[0].pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(readers[0].pid).status() == psutil.STATUS_STOPPED, _WAIT_S, lambda: "it runs on")
        pipes[2][0].send("stopped")
        result, slowest_s = _receive(pipes[2][0])
        assert result == {"stopped": False, "other": True, "other, later": True}
        assert slowest_s < 10
    finally:
        for process in (*readers, writing):
            process.kill()
            process.join()


def _write_to_both(pipe: Connection) -> None:
    transport, slowest_s = NixlTransport("writer"), 0.0
    transport.register({0: torch.zeros(1 << 20, dtype=torch.uint8)})
    stopped, other = (transport.connect(description) for description in pipe.recv())
    assert all(_is_written(transport, peer, _WAIT_S) for peer in (stopped, other))
    pipe.send("both are reached")
    assert pipe.recv() == "stopped"
    result = {}
    for name, peer, patience_s in (("stopped", stopped, 1.0), ("other", other, _WAIT_S), ("other, later", other, _WAIT_S)):
        began = time.monotonic()
        result[name] = _is_written(transport, peer, patience_s)
        slowest_s = max(slowest_s, time.monotonic() - began)
        if name == "other":
            transport.disconnect(stopped)
    transport.close()
    pipe.send((result, slowest_s))


def _is_written(transport: NixlTransport, peer: str, patience_s: float) -> bool:
    write = transport.write(peer, Ranges.single(0, 0, 0, 0, 1 << 20), b"all")
    ends = time.monotonic() + patience_s
    while not (done := write.is_done()) and time.monotonic() < ends:
        continue
    return done


@pytest.mark.long
def test_a_description_of_nonsense_is_refused() -> None:
    result = _result_of(_connect_to_nonsense)
    assert "a description of 3 bytes is not one of a NIXL peer" in str(result)


def _connect_to_nonsense(pipe: Connection) -> None:
    transport = NixlTransport("alone")
    try:
        transport.connect(b"abc")
        pipe.send("nothing was raised")
    except TransferError as error:
        pipe.send(str(error))


def test_the_version_for_the_handshake_is_that_of_the_package() -> None:
    assert nixl_version().split(".")[0].isdigit()


def test_an_idle_agent_leaves_the_processor_to_others() -> None:
    transport = NixlTransport("idle")
    try:
        time.sleep(0.2)
        before, began = time.process_time(), time.monotonic()
        time.sleep(1)
        assert time.process_time() - before < 0.2 * (time.monotonic() - began)
    finally:
        transport.close()
