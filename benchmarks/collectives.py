"""Compare the collectives of every group backend: the median time of one operation, by size and number of ranks.

    python benchmarks/collectives.py [--quick]

Ranks are spawned processes with one compute thread each (for the thread backend, threads of one process). The times are those
of rank 0, in microseconds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.queues import Queue

import torch
from torch import Tensor

from actors.groups.distributed.rendezvous import join_store, serve_store
from actors.groups.distributed.torch_group import TorchGroup
from actors.groups.group import Group
from actors.groups.shared_memory.shared_memory import SharedMemoryGroup, shared_memory_works
from actors.groups.thread import run_ranks, thread_groups

KIB = 1024
SIZES = (1 * KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB, 16384 * KIB)
QUICK_SIZES = (4 * KIB, 64 * KIB, 1024 * KIB)
WORLDS = (2, 4)
BUDGET_S, QUICK_BUDGET_S = 1.0, 0.3
"""Approximate time spent on one cell of the table, in seconds."""
Medians = dict[tuple[str, int], float]
"""Median times in microseconds, by operation and size in bytes."""


def _ring(group: Group, x: Tensor) -> None:
    group.send(x, (group.rank + 1) % group.size)
    group.recv(x.shape, x.dtype, (group.rank - 1) % group.size)


def _all_to_all(group: Group, x: Tensor) -> None:
    splits = [len(x) // group.size] * group.size
    group.all_to_all(x, splits, splits)


OPERATIONS: dict[str, Callable[[Group, Tensor], object]] = {
    "all_reduce": lambda group, x: group.all_reduce(x),
    "all_gather": lambda group, x: group.all_gather(x[: len(x) // group.size]),
    "reduce_scatter": lambda group, x: group.reduce_scatter(x),
    "all_to_all": _all_to_all,
    "ring send+recv": _ring,
}


def measure(group: Group, sizes: tuple[int, ...], budget_s: float) -> Medians:
    """Returns the median over as many calls as fit the budget. Rank 0 decides the number of calls, so that all ranks make
    equally many."""
    medians: Medians = {}
    for operation, act in OPERATIONS.items():
        for num_bytes in sizes:
            x = torch.ones(num_bytes // 4)
            pilot = statistics.median(_times(group, act, x, 5))
            own_count = torch.tensor([max(5, min(500, int(budget_s / pilot)))])
            count = int(group.all_gather(own_count)[0])
            medians[operation, num_bytes] = statistics.median(_times(group, act, x, count)) * 1e6
    return medians


def _times(group: Group, act: Callable[[Group, Tensor], object], x: Tensor, count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        act(group, x)
        times.append(time.perf_counter() - began)
    return times


def rank_process(
    rank: int, world: int, backend: str, port: int, sizes: tuple[int, ...], budget_s: float, answers: Queue[Medians]
) -> None:
    """Run one rank. Rank 0 puts its medians into `answers`."""
    torch.set_num_threads(1)
    name = f"benchmark.{port}.{world}"
    if backend == "gloo":
        group: Group = TorchGroup(join_store("benchmark", "127.0.0.1", port), name, rank, world, "tp")
    else:
        group = SharedMemoryGroup.attach(name, rank, world, "tp")
    medians = measure(group, sizes, budget_s)
    group.barrier()
    group.close()
    if rank == 0:
        answers.put(medians)


def measure_processes(backend: str, world: int, sizes: tuple[int, ...], budget_s: float) -> Medians:
    """Spawn the ranks and return the medians of rank 0."""
    context = multiprocessing.get_context("spawn")
    _store, port = serve_store("benchmark")
    answers: Queue[Medians] = context.Queue()
    arguments = (world, backend, port, sizes, budget_s, answers)
    ranks = [context.Process(target=rank_process, args=(rank, *arguments), daemon=True) for rank in range(world)]
    for process in ranks:
        process.start()
    medians = answers.get(timeout=600)
    for process in ranks:
        process.join()
    return medians


def print_table(columns: dict[tuple[str, int], Medians], sizes: tuple[int, ...]) -> None:
    """Print one row per operation and size, and one column per backend and number of ranks."""
    print(f"{'median us':>16} {'KiB':>6}" + "".join(f"{f'{backend} x{world}':>18}" for backend, world in columns))
    for operation in OPERATIONS:
        for num_bytes in sizes:
            cells = "".join(f"{medians[operation, num_bytes]:18.1f}" for medians in columns.values())
            print(f"{operation:>16} {num_bytes // KIB:6}{cells}")


def main() -> None:
    """Measure all backends and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three sizes, a third of the time")
    quick = parser.parse_args().quick
    sizes, budget_s = (QUICK_SIZES, QUICK_BUDGET_S) if quick else (SIZES, BUDGET_S)
    torch.set_num_threads(1)
    backends = ["shared memory", "gloo"] if shared_memory_works() else ["gloo"]
    columns: dict[tuple[str, int], Medians] = {}
    for world in WORLDS:
        for backend in backends:
            columns[backend, world] = measure_processes(backend, world, sizes, budget_s)
        columns["threads", world] = run_ranks(thread_groups(world, "tp"), lambda group: measure(group, sizes, budget_s))[0]
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print_table(columns, sizes)


if __name__ == "__main__":
    main()
