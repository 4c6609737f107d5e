"""Shared memory and gloo between real processes: one set of four runs everything once, the tests look at what it left."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import IO

import pytest
import torch

from actors.groups.distributed.rendezvous import serve_store

WORLD = 4
BACKENDS = ("gloo", "shared memory", "small slots")
VICTIMS = {"shared memory": 3, "gloo": 2}
SCRIPT = Path(__file__).with_name("battery.py")


def _load_battery() -> ModuleType:
    spec = importlib.util.spec_from_file_location("groups_battery", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


battery = _load_battery()


@dataclass
class Run:
    """What the four processes left behind."""

    directory: Path
    token: str
    killed_at: dict[str, float] = field(default_factory=dict)

    def results(self, backend: str, size: int, turn: int, rank: int) -> dict[str, object]:
        return torch.load(self.directory / f"{backend}-{size}-{turn}-{rank}.pt", weights_only=False)

    def error(self, backend: str, rank: int) -> tuple[float, str]:
        at, text = (self.directory / f"error-{backend}-{rank}.txt").read_text().split(" ", 1)
        return float(at), text


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("battery"), f"battery{os.getpid()}")
    store, port = serve_store(run.token)
    command = [str(port), run.token, str(run.directory)]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[3])}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(WORLD), *command],
            env=environment, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    try:
        for backend, victim in VICTIMS.items():
            _read_line(ranks[victim].stdout, backend)
            run.killed_at[backend] = time.monotonic()
            ranks[victim].send_signal(signal.SIGKILL)
        for rank in ranks:
            rank.wait(timeout=120)
        yield run
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    del store


def _read_line(stream: IO[str] | None, expected: str) -> None:
    """Wait for a rank to say that it is in its endless loop; end of file means that it died first."""
    assert stream is not None
    for line in stream:
        if line.strip() == expected:
            return
    pytest.fail(f"a rank ended before it came to {expected!r}")


@pytest.mark.parametrize("size", battery.SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_operation_gives_exactly_the_plain_result(finished: Run, backend: str, size: int) -> None:
    for rank in range(size):
        results = finished.results(backend, size, 0, rank)
        for label, expected in battery.expected(size, rank).items():
            found = results[label]
            assert found.dtype == expected.dtype, label
            assert torch.equal(found, expected), f"{label} on rank {rank} of {size}"


@pytest.mark.parametrize("backend", ["gloo", "shared memory"])
def test_a_second_run_gives_the_same_bits(finished: Run, backend: str) -> None:
    for rank in range(WORLD):
        first, second = (finished.results(backend, WORLD, turn, rank) for turn in (0, 1))
        assert all(torch.equal(first[label], second[label]) for label in first if label != "counters")


@pytest.mark.parametrize("size", battery.SIZES)
def test_counters_are_equal_on_all_backends(finished: Run, size: int) -> None:
    for rank in range(size):
        counters = [finished.results(backend, size, 0, rank)["counters"] for backend in BACKENDS]
        assert counters[0] == counters[1] == counters[2]
        assert counters[0][0]["all_reduce"] > 0


@pytest.mark.parametrize("backend", ["gloo", "shared memory"])
def test_a_rank_is_in_two_groups_at_once(finished: Run, backend: str) -> None:
    for rank in range(WORLD):
        row, column = 2 * (rank // 2), rank % 2
        expected = [[row, row + 1], [column, column + 2]] * 5
        found = torch.load(finished.directory / f"axes-{backend}-{rank}.pt")
        assert [tensor.tolist() for tensor in found] == expected


@pytest.mark.parametrize("backend", VICTIMS)
def test_a_killed_rank_is_named_to_all_others_at_once(finished: Run, backend: str) -> None:
    victim = VICTIMS[backend]
    for rank in range(victim):
        at, text = finished.error(backend, rank)
        assert at - finished.killed_at[backend] < 5.0, text
        assert "all_reduce" in text
        assert "axis tp" in text
        assert f"rank {victim} (pid" in text or "has failed" in text
    assert any(f"rank {victim} (pid" in finished.error(backend, rank)[1] for rank in range(victim))


def test_nothing_is_left_in_shared_memory(finished: Run) -> None:
    assert [path.name for path in Path("/dev/shm").glob(f"*{finished.token}*")] == []
