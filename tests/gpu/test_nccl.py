"""An NCCL group of as many GPUs as there are, each with a process: the same values as the thread group, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from actors.groups.distributed.rendezvous import serve_store
from actors.groups.group import Group
from actors.groups.thread import run_ranks, thread_groups
from tests.cpu.groups import battery

SCRIPT = Path(__file__).with_name("nccl_rank.py")
MOST_RANKS = len(battery.ROWS["even"])
DEADLINE_S = 180.0


@pytest.fixture
def world(device: torch.device) -> int:
    """Ranks of the group: one for each GPU."""
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs, and there is one: NCCL refuses two ranks on the same")
    return min(count, MOST_RANKS)


def test_collectives_equal_the_thread_group_s(world: int, tmp_path: Path) -> None:
    assert_equal(over_nccl(world, tmp_path, "collectives"), over_threads(world))


@pytest.mark.xfail(
    reason="NCCL connects a pair at its first send, and blocks until the peer names the same pair: in a ring where everybody "
    "sends first, nobody does"
)
def test_rings_equal_the_thread_group_s(world: int, tmp_path: Path) -> None:
    assert_equal(over_nccl(world, tmp_path, "rings"), over_threads(world))


def over_threads(world: int) -> list[dict[str, object]]:
    def rank(group: Group) -> dict[str, object]:
        return battery.run(group)

    return run_ranks(thread_groups(world, "tp"), rank)


def over_nccl(world: int, directory: Path, kind: str) -> list[dict[str, torch.Tensor]]:
    """What each rank left behind. Fails with the ranks' errors, or those that did not end in time; none stays alive."""
    token = f"nccl{os.getpid()}{kind}"
    store, port = serve_store(token)
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])}
    command = [str(world), str(port), token, str(directory), kind]
    ranks = [
        subprocess.Popen([sys.executable, str(SCRIPT), str(rank), *command], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    try:
        deadline = time.monotonic() + DEADLINE_S
        for number, rank in enumerate(ranks):
            try:
                _, errors = rank.communicate(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pytest.fail(f"rank {number} of {world} has not ended after {DEADLINE_S:g} s")
            assert rank.returncode == 0, f"rank {number} of {world}: {errors[-2000:]}"
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        del store
    return [torch.load(directory / f"{rank}.pt", weights_only=True) for rank in range(world)]


def assert_equal(found: list[dict[str, torch.Tensor]], right: list[dict[str, object]]) -> None:
    for rank, (ours, theirs) in enumerate(zip(found, right, strict=True)):
        assert ours
        for label, value in ours.items():
            assert torch.equal(value, theirs[label]), f"rank {rank}: {label}"  # type: ignore[arg-type]
