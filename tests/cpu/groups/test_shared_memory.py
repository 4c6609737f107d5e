"""What can go wrong with a shared-memory group, with ranks as threads of this process where no process has to die."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from actors.groups.group import Group, GroupError
from actors.groups.liveness import ProcessId
from actors.groups.shared_memory import segment
from actors.groups.shared_memory.shared_memory import SharedMemoryGroup
from actors.groups.thread import run_ranks, thread_groups

NAME = f"edge{os.getpid()}"
Result = TypeVar("Result")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert [path.name for path in segment.DIRECTORY.glob(f"*{NAME}*")] == []


def in_shared_memory(size: int, body: Callable[[SharedMemoryGroup, Group], Result], timeout_s: float = 20.0) -> list[Result]:
    """Run `body` in `size` threads, with a shared-memory group and, to keep step in the test, a thread group."""

    def rank(threads: Group) -> Result:
        group = SharedMemoryGroup.attach(NAME, threads.rank, size, "tp", timeout_s)
        try:
            return body(group, threads)
        finally:
            group.close()

    return run_ranks(thread_groups(size, "test"), rank)


def test_a_rank_that_never_attaches_is_named() -> None:
    with pytest.raises(GroupError, match=r"tp group 'edge\d+', rank 0 of 3: waited 0\.\d s for ranks \[1, 2\] to attach"):
        SharedMemoryGroup.attach(NAME, 0, 3, "tp", timeout_s=0.1)
    with pytest.raises(GroupError, match="rank 0 did not make the group"):
        SharedMemoryGroup.attach(NAME, 1, 3, "tp", timeout_s=0.1)


def test_the_death_of_the_first_rank_while_attaching_is_noticed_and_cleaned_up() -> None:
    code = f"from actors.groups.shared_memory.shared_memory import *; SharedMemoryGroup.attach('{NAME}', 0, 3, 'tp')"
    maker = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(Path.cwd())})
    try:
        deadline = time.monotonic() + 60
        while segment.find(NAME) is None and time.monotonic() < deadline:
            os.sched_yield()

        def body(group: Group) -> float:
            if group.rank == 0:
                _wait_until_mapped(maker.pid)
                maker.kill()
                return time.monotonic()
            with pytest.raises(GroupError, match=rf"rank 0 \(pid {maker.pid}\) has died while the group was made"):
                SharedMemoryGroup.attach(NAME, 1, 3, "tp", timeout_s=60)
            return time.monotonic()

        killed, noticed = run_ranks(thread_groups(2, "test"), body)
        assert noticed - killed < 5.0
    finally:
        maker.kill()
        maker.wait()


def _wait_until_mapped(other_pid: int) -> None:
    """Until this process has mapped the file that the other one has made."""
    deadline = time.monotonic() + 30
    while NAME not in Path("/proc/self/maps").read_text() and time.monotonic() < deadline:
        os.sched_yield()
    assert NAME in Path(f"/proc/{other_pid}/maps").read_text()


def test_files_of_ended_processes_are_swept_and_those_of_living_ones_are_not() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    me = ProcessId.current()
    stale = segment.DIRECTORY / f"{segment.PREFIX}-{NAME}.old-{me.space}-{ended.pid}-1"
    unfinished = stale.with_name(stale.name + "-new")
    living = segment.DIRECTORY / f"{segment.PREFIX}-{NAME}.live-{me}"
    elsewhere = segment.DIRECTORY / f"{segment.PREFIX}-{NAME}.far-another.space-{ended.pid}-1"
    files = (stale, unfinished, living, elsewhere)
    try:
        for path in files:
            path.touch()
        SharedMemoryGroup.attach(NAME, 0, 1, "tp").close()
        assert [path.exists() for path in files] == [False, False, True, True]
    finally:
        for path in files:
            path.unlink(missing_ok=True)


def test_memory_that_is_not_there_is_an_error_and_not_a_crash() -> None:
    with pytest.raises(GroupError, match=r"of 2 ranks needs \d+\.\d MiB in /dev/shm: .*--shm-size"):
        SharedMemoryGroup.attach(NAME, 0, 2, "tp", slot_bytes=1 << 44)


def test_ranks_that_were_told_different_sizes_do_not_meet() -> None:
    def body(group: Group) -> None:
        SharedMemoryGroup.attach(NAME, group.rank, 2 + group.rank, "tp", timeout_s=0.5)

    with pytest.raises(GroupError, match=r"is not the group this rank|to attach"):
        run_ranks(thread_groups(2, "test"), body)


def test_other_machines_are_sent_to_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(GroupError, match="not aarch64; use gloo"):
        SharedMemoryGroup.attach(NAME, 0, 2, "tp")


def test_ranks_that_do_different_things_are_told_so() -> None:
    def body(group: SharedMemoryGroup, threads: Group) -> str:
        with pytest.raises(GroupError) as caught:
            group.barrier() if group.rank else group.all_reduce(torch.ones(3))
        threads.barrier()
        return str(caught.value)

    first, second = in_shared_memory(2, body)
    assert "all_reduce on axis tp, rank 0 of 2: rank 1 is in barrier" in first
    assert "all_reduce of 3 elements of torch.float32, this rank in barrier" in second


def test_all_to_all_with_numbers_that_do_not_agree_is_refused() -> None:
    def body(group: SharedMemoryGroup, threads: Group) -> str:
        with pytest.raises(GroupError) as caught:
            group.all_to_all(torch.ones(3), *(([1, 2], [1, 1]) if group.rank == 0 else ([2, 1], [1, 1])))
        threads.barrier()
        return str(caught.value)

    assert "receive=[1, 1] but the ranks sent [1, 2] rows" in in_shared_memory(2, body)[0]


def test_a_message_of_another_shape_is_refused() -> None:
    def body(group: SharedMemoryGroup, threads: Group) -> str:
        if group.rank == 0:
            group.send(torch.ones(3), 1)
            threads.barrier()
            return ""
        with pytest.raises(GroupError) as caught:
            group.recv((2,), torch.float32, 0)
        threads.barrier()
        return str(caught.value)

    assert "recv from rank 0 on axis tp, rank 1 of 2: expected 8 bytes" in in_shared_memory(2, body)[1]


def test_mail_can_be_taken_after_the_sender_has_closed_and_then_no_more_comes() -> None:
    def body(group: SharedMemoryGroup, threads: Group) -> list[float]:
        if group.rank == 0:
            group.send(torch.tensor([1.0]), 1)
            group.send(torch.tensor([2.0]), 1)
            group.close()
            threads.barrier()
            return []
        threads.barrier()
        taken = [group.recv((1,), torch.float32, 0).item() for _ in range(2)]
        with pytest.raises(GroupError, match=r"recv from rank 0.*rank 0 has closed the group"):
            group.recv((1,), torch.float32, 0)
        return taken

    assert in_shared_memory(2, body)[1] == [1.0, 2.0]


def test_a_message_larger_than_the_ring_survives_the_close_of_its_sender() -> None:
    large = torch.arange(1_500_000, dtype=torch.float32)

    def body(group: SharedMemoryGroup, threads: Group) -> bool:
        if group.rank == 0:
            group.send(large, 1)
            group.close()
            return True
        return torch.equal(group.recv(large.shape, torch.float32, 0), large)

    assert in_shared_memory(2, body) == [True, True]


def test_a_sender_far_ahead_waits_and_gives_up_at_the_deadline() -> None:
    def body(group: SharedMemoryGroup, threads: Group) -> int:
        if group.rank == 0:
            for _ in range(segment.RECORDS):
                group.send(torch.ones(1), 1)
            with pytest.raises(GroupError, match=r"send to rank 1 on axis tp.*rank 1 runs but did not answer"):
                group.send(torch.ones(1), 1)
        threads.barrier()
        return group.calls["send"]

    assert in_shared_memory(2, body, timeout_s=0.3)[0] == segment.RECORDS + 1


def test_many_messages_wrap_around_the_ring_in_order() -> None:
    def body(group: SharedMemoryGroup, threads: Group) -> bool:
        open_before = len(os.listdir("/proc/self/fd"))
        shapes = [(1 + 977 * number % 200_000,) for number in range(150)]
        for at in range(0, len(shapes), 10):
            for number in range(at, at + 10):
                group.send(torch.full(shapes[number], float(number)), 1 - group.rank)
            for number in range(at, at + 10):
                if not bool((group.recv(shapes[number], torch.float32, 1 - group.rank) == number).all()):
                    return False
        threads.barrier()
        # Files of messages that did not fit the ring are closed as soon as the next send sees them taken.
        return len(os.listdir("/proc/self/fd")) < open_before + 30

    assert in_shared_memory(2, body) == [True, True]


def test_inference_mode_may_come_and_go() -> None:
    def body(group: SharedMemoryGroup, threads: Group) -> list[float]:
        found = []
        for inference in (True, False, True, False):
            with torch.inference_mode(inference):
                found.append(group.all_reduce(torch.ones(1)).item())
                group.send(torch.ones(1), 1 - group.rank)
                group.recv((1,), torch.float32, 1 - group.rank)
        return found

    assert in_shared_memory(2, body) == [[2.0] * 4] * 2


def test_a_closed_group_refuses_and_closing_twice_is_harmless() -> None:
    group = SharedMemoryGroup.attach(NAME, 0, 1, "tp")
    group.close()
    group.close()
    with pytest.raises(GroupError, match=r"barrier on axis tp.*this group is closed"):
        group.barrier()
