"""A group whose ranks are threads of one process: the backend of tests, and of sweeps over many layouts.

Each collective is one *step* on a board that all ranks share. A rank posts a copy of its tensor, waits until every rank has
posted for that step, and computes its own result from the posts::

    step 7:   rank 0 post   rank 1 post   rank 2 (missing)   -> ranks 0 and 1 wait
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from actors.groups.base import DEFAULT_TIMEOUT_S, CountedGroup, starts
from actors.groups.group import Group, GroupError
from actors.groups.reduction import sum_in_rank_order

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Post:
    """One rank's contribution to one step. `agreed` must be equal on all ranks; `splits` may differ."""

    agreed: tuple[object, ...]
    tensor: Tensor
    splits: Sequence[int] = ()


@dataclass
class _Board:
    """State shared by the ranks of one group; `changed` guards all of it."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    posts: dict[int, dict[int, _Post]] = field(default_factory=lambda: defaultdict(dict))
    readers: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    mail: dict[tuple[int, int], deque[Tensor]] = field(default_factory=lambda: defaultdict(deque))
    gone: dict[int, str] = field(default_factory=dict)
    """By rank: why it will not take part in any further step."""


class ThreadGroup(CountedGroup):
    """One rank of a group of threads. Create all ranks together with `thread_groups`."""

    def __init__(self, board: _Board, rank: int, size: int, axis: str, timeout_s: float) -> None:
        super().__init__(rank, size, axis, timeout_s)
        self._board = board
        self._step = 0

    def close(self) -> None:
        """See `Group.close`."""
        self._leave("has closed the group")

    def _all_reduce(self, x: Tensor) -> Tensor:
        posts = self._exchange(_Post(("all_reduce", x.dtype, tuple(x.shape)), x.clone()))
        return sum_in_rank_order([post.tensor for post in posts])

    def _all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        posts = self._exchange(_Post(("all_gather", x.dtype, tuple(x.shape[1:]), tuple(sizes)), x.clone()))
        return torch.cat([post.tensor for post in posts])

    def _reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        posts = self._exchange(_Post(("reduce_scatter", x.dtype, tuple(x.shape), tuple(sizes)), x.clone()))
        start = starts(sizes)[self.rank]
        return sum_in_rank_order([post.tensor[start : start + sizes[self.rank]] for post in posts])

    def _all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        posts = self._exchange(_Post(("all_to_all", x.dtype, tuple(x.shape[1:])), x.clone(), send))
        sent_here = [post.splits[self.rank] for post in posts]
        if sent_here != list(receive):
            self._refuse("all_to_all", f"receive={list(receive)} but the ranks sent {sent_here} rows")
        return torch.cat([self._rows_for_me(post) for post in posts])

    def _rows_for_me(self, post: _Post) -> Tensor:
        start = starts(post.splits)[self.rank]
        return post.tensor[start : start + post.splits[self.rank]]

    def _barrier(self) -> None:
        self._exchange(_Post(("barrier",), torch.empty(0)))

    def _send(self, x: Tensor, to: int) -> None:
        with self._board.changed:
            if self.rank in self._board.gone:
                self._refuse("send", f"this rank {self._board.gone[self.rank]}")
            self._board.mail[self.rank, to].append(x.clone())
            self._board.changed.notify_all()

    def _recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> Tensor:
        with self._board.changed:
            mail = self._board.mail[source, self.rank]
            self._wait("recv", lambda: [] if mail else [source])
            tensor = mail.popleft()
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            self._refuse(
                "recv", f"expected {shape} {dtype} from rank {source}, which sent {tuple(tensor.shape)} {tensor.dtype}"
            )
        return tensor

    def _exchange(self, post: _Post) -> list[_Post]:
        """Post for the next step and return every rank's post, in rank order."""
        step, self._step = self._step, self._step + 1
        operation = str(post.agreed[0])
        board = self._board
        with board.changed:
            posts = board.posts[step]
            posts[self.rank] = post
            board.changed.notify_all()
            self._wait(operation, lambda: [rank for rank in range(self.size) if rank not in posts])
            board.readers[step] += 1
            if board.readers[step] == self.size:
                del board.posts[step], board.readers[step]
        self._check_agreement(operation, posts)
        return [posts[rank] for rank in range(self.size)]

    def _check_agreement(self, operation: str, posts: dict[int, _Post]) -> None:
        for rank in range(self.size):
            if posts[rank].agreed != posts[self.rank].agreed:
                self._leave(f"disagreed with rank {rank} on an operation")
                self._refuse(operation, f"rank {rank} called {posts[rank].agreed}, this rank {posts[self.rank].agreed}")

    def _wait(self, operation: str, missing: Callable[[], list[int]]) -> None:
        """Wait, holding the lock, until `missing` returns no rank. Raises `GroupError` if a missing rank is gone, or on
        timeout."""
        began = time.monotonic()
        board = self._board
        while peers := missing():
            waited_s = time.monotonic() - began
            gone = {rank: why for rank, why in board.gone.items() if rank in (*peers, self.rank)}
            if gone or waited_s >= self.timeout_s:
                reasons = "; ".join(f"rank {rank} {why}" for rank, why in gone.items()) or "they did not come"
                board.gone.setdefault(self.rank, f"gave up in {operation}")
                board.changed.notify_all()
                self._refuse(operation, f"waited {waited_s:.1f} s for ranks {peers}: {reasons}")
            board.changed.wait(self.timeout_s - waited_s)

    def _leave(self, why: str) -> None:
        with self._board.changed:
            self._board.gone.setdefault(self.rank, why)
            self._board.changed.notify_all()


def thread_groups(size: int, axis: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Group]:
    """Return the `size` ranks of a new group of threads in this process, in rank order; each must be used by a thread of its
    own. `axis` is used in error messages; `timeout_s` limits each operation."""
    board = _Board()
    return [ThreadGroup(board, rank, size, axis, timeout_s) for rank in range(size)]


def run_ranks(groups: Sequence[Group], body: Callable[[Group], Result]) -> list[Result]:
    """Run `body` with each of `groups` in its own thread, wait for all, and return the results in the order of `groups`.

    A rank that raises closes its group, so that its peers do not wait for it. Raises the first error other than `GroupError` if
    there is one, because a `GroupError` is usually only its consequence; otherwise the first `GroupError`.
    """
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = body(groups[index])
        except BaseException as error:
            errors.append(error)
            groups[index].close()

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, GroupError)), errors[0])
    return [results[index] for index in range(len(groups))]
