"""Every operation of a group over many shapes, and a process that runs it as one rank (used by the group tests).

``python battery.py RANK WORLD PORT TOKEN DIRECTORY``: runs the battery on both process backends, then takes part
in two groups at once, then in groups whose last rank is killed. Results go to DIRECTORY.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from actors.groups.distributed.rendezvous import join_store
from actors.groups.distributed.torch_group import TorchGroup
from actors.groups.group import Group, GroupError
from actors.groups.shared_memory.shared_memory import SharedMemoryGroup

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
ROWS = {"even": (3, 3, 3, 3), "uneven": (0, 5, 1, 2), "none": (0, 0, 0, 0)}
SIZES = (2, 3, 4)
LARGE = 100_001
"""Elements a rank: several steps of shared memory, and not a multiple of anything."""
TIMEOUT_S = 20.0


def values(rank: int, label: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What rank `rank` brings to the case `label`: the same in every process."""
    noise = torch.Generator().manual_seed(zlib.crc32(f"{label}/{rank}".encode()))
    if dtype == torch.int64:
        return torch.randint(-(2**40), 2**40, shape, generator=noise)
    return torch.randn(shape, generator=noise).mul_(3.0).to(dtype)


def plain_sum(parts: list[Tensor]) -> Tensor:
    """The specified sum: one rank after another, narrow floats in fp32."""
    wide = [part if part.dtype == torch.int64 else part.float() for part in parts]
    total = wide[0].clone()
    for part in wide[1:]:
        total = total + part
    return total.to(parts[0].dtype)


def exchange_rows(source: int, to: int) -> int:
    """Rows that `source` sends to `to` in the all-to-all cases; some are zero."""
    return (3 * source + 2 * to) % 4


Case = tuple[str, Callable[[Group], Tensor], Callable[[int, int], Tensor]]
"""A label, what a rank does, and what rank r of n must get."""


def cases(size: int) -> Iterator[Case]:
    for dtype in DTYPES:
        for kind, all_rows in ROWS.items():
            yield from _row_cases(f"{kind}/{dtype}", all_rows[:size], dtype)
        yield _all_to_all(f"all_to_all/{dtype}", size, dtype)
        yield _ring(f"ring/{dtype}", dtype, (2, 5), 3)
    yield _ring("ring/large", torch.float32, (1_200_000,), 2)
    yield from _row_cases("large", tuple(LARGE // 7 + 7 * rank for rank in range(size)), torch.float32)
    for before in (0, 1, 3, 4093):
        yield _row_at(before)


def _row_cases(label: str, rows: tuple[int, ...], dtype: torch.dtype) -> Iterator[Case]:
    total, size = sum(rows), len(rows)
    even = rows if len(set(rows)) > 1 else None

    def mine(rank: int) -> Tensor:
        return values(rank, label, (rows[rank], 7), dtype)

    def whole(rank: int) -> Tensor:
        return values(rank, label, (total, 7), dtype)

    def summed() -> Tensor:
        return plain_sum([whole(rank) for rank in range(size)])

    yield f"all_reduce/{label}", lambda g: g.all_reduce(whole(g.rank)), lambda rank, n: summed()
    yield (
        f"all_gather/{label}",
        lambda g: g.all_gather(mine(g.rank), even),
        lambda rank, n: torch.cat([mine(peer) for peer in range(n)]),
    )
    yield (
        f"reduce_scatter/{label}",
        lambda g: g.reduce_scatter(whole(g.rank), even),
        lambda rank, n: summed()[sum(rows[:rank]) : sum(rows[: rank + 1])],
    )


def _all_to_all(label: str, size: int, dtype: torch.dtype) -> Case:
    def part(source: int, to: int) -> Tensor:
        return values(source, f"{label}/{to}", (exchange_rows(source, to), 3, 2), dtype)

    def act(g: Group) -> Tensor:
        send = [exchange_rows(g.rank, to) for to in range(size)]
        receive = [exchange_rows(source, g.rank) for source in range(size)]
        return g.all_to_all(torch.cat([part(g.rank, to) for to in range(size)]), send, receive)

    return label, act, lambda rank, n: torch.cat([part(source, rank) for source in range(n)])


def _ring(label: str, dtype: torch.dtype, shape: tuple[int, ...], count: int) -> Case:
    """Everybody sends `count` messages to the next rank, changes its buffer, and only then receives."""

    def act(g: Group) -> Tensor:
        for number in range(count):
            x = values(g.rank, f"{label}/{number}", shape, dtype)
            g.send(x, (g.rank + 1) % g.size)
            x.zero_()
        return torch.stack([g.recv(shape, dtype, (g.rank - 1) % g.size) for _ in range(count)])

    def expected(rank: int, n: int) -> Tensor:
        return torch.stack([values((rank - 1) % n, f"{label}/{number}", shape, dtype) for number in range(count)])

    return label, act, expected


def _row_at(before: int) -> Case:
    """The same 5 rows, with `before` rows of something else in front of them in the buffer."""

    def rows(rank: int) -> Tensor:
        return values(rank, "row", (5, 9), torch.float32)

    def act(g: Group) -> Tensor:
        front = values(g.rank, "front", (before, 9), torch.float32)
        return g.all_reduce(torch.cat([front, rows(g.rank)]))[before:].clone()

    return f"row at {before}", act, lambda rank, n: plain_sum([rows(peer) for peer in range(n)])


def run(group: Group) -> dict[str, object]:
    """All results by label, and the counters."""
    with torch.inference_mode():
        results: dict[str, object] = {label: act(group).clone() for label, act, _ in cases(group.size)}
        group.barrier()
    results["counters"] = (dict(group.calls), dict(group.sent_bytes))
    return results


@cache
def expected(size: int, rank: int) -> dict[str, Tensor]:
    return {label: plain(rank, size) for label, _, plain in cases(size)}


def main(rank: int, world: int, port: int, token: str, directory: Path) -> None:
    torch.set_num_threads(1)
    store = join_store(token, "127.0.0.1", port)

    def make(backend: str, name: str, members: list[int], axis: str = "tp") -> Group:
        at, size = members.index(rank), len(members)
        if backend == "gloo":
            return TorchGroup(store, f"{token}/{name}", at, size, axis, timeout_s=TIMEOUT_S)
        slot_bytes = 32768 if backend == "small slots" else 1 << 20
        return SharedMemoryGroup.attach(f"{token}.{name}", at, size, axis, TIMEOUT_S, slot_bytes)

    for size in SIZES:
        for backend in ("gloo", "shared memory", "small slots") if rank < size else ():
            for turn in (0,) if backend == "small slots" else (0, 1):
                group = make(backend, f"{backend.replace(' ', '_')}.{size}.{turn}", list(range(size)))
                torch.save(run(group), directory / f"{backend}-{size}-{turn}-{rank}.pt")
                group.close()
    for backend in ("gloo", "shared memory"):
        torch.save(_two_axes(make, backend, rank), directory / f"axes-{backend}-{rank}.pt")
    for backend, members in (("shared memory", [0, 1, 2, 3]), ("gloo", [0, 1, 2])):
        if rank in members:
            group = make(backend, f"doomed.{backend[:4]}", members)
            (directory / f"error-{backend}-{rank}.txt").write_text(_until_it_fails(group, backend))


def _two_axes(make: Callable[[str, str, list[int], str], Group], backend: str, rank: int) -> list[Tensor]:
    """A 2 x 2 grid: this rank is in a row and in a column at the same time."""
    row, column = rank // 2, rank % 2
    tp = make(backend, f"row{row}", [2 * row, 2 * row + 1], "tp")
    pp = make(backend, f"column{column}", [column, column + 2], "pp")
    x = torch.tensor([float(rank)])
    found = []
    for _ in range(5):
        found += [tp.all_gather(x), pp.all_gather(x)]
    tp.close()
    pp.close()
    return found


def _until_it_fails(group: Group, backend: str) -> str:
    """Reduce for ever, small and large; returns when it failed (monotonic clock) and with what."""
    small, large = torch.ones(10), torch.ones(LARGE)
    try:
        for turn in range(10**9):
            group.all_reduce(small)
            group.all_reduce(large)
            if turn == 5:
                print(backend, flush=True)
    except GroupError as error:
        return f"{time.monotonic()} {error}"
    return "it never failed"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
