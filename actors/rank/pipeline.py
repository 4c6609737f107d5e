"""A rank's place in the pipeline: hidden states go from stage to stage, sampled tokens from the last stage back to all.

    stage 0 ──hidden──→ stage 1 ──hidden──→ stage 2 (samples)
       ↑                   ↑ ───────tokens────── │
       └───────────────────────tokens────────────┘

Sends do not wait; receives do, as late as they can: hidden states when the stage is ready for them, a step's tokens when a
plan refers to one of them, or once the engine is known to have the step's result (so that none piles up). So a stage
works while the one behind it does, and the first stage can embed a token that the engine has not seen yet.

Under context parallelism only the ranks of cp rank 0 sample. The other cp ranks of the last stage hear from them at once,
and every rank of the last stage tells those of its own pp group.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from actors.groups.group import Group


class Pipeline:
    """Talks to the ranks of `pp`, which hold the same slice of successive stages, and of `cp`."""

    def __init__(self, pp: Group, cp: Group, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.is_first, self.is_last = pp.rank == 0, pp.rank == pp.size - 1
        self.waited_s = 0.0
        """Seconds spent waiting for other stages so far (of the host: on CUDA a receive returns once it is queued)."""
        self.busy_s = 0.0
        """Seconds spent on steps so far without those; the runner adds them up."""
        self._pp, self._cp = pp, cp
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device
        self._unreceived: deque[tuple[int, list[int]]] = deque()
        """Steps whose tokens have not been taken, oldest first, and the sequences they were sampled for."""

    def receive(self, rows: int) -> Tensor | None:
        """`rows` hidden states [rows, hidden] of the stage before; None on the first. No rows are not sent."""
        if self.is_first:
            return None
        if rows == 0:
            return torch.empty((0, self._hidden_size), dtype=self._dtype, device=self._device)
        with self._waiting():
            return self._pp.recv((rows, self._hidden_size), self._dtype, self._pp.rank - 1)

    def send(self, hidden: Tensor) -> None:
        """Hand [rows, hidden] to the next stage."""
        if len(hidden):
            self._pp.send(hidden, self._pp.rank + 1)

    def publish_tokens(self, tokens: Sequence[int] | None, count: int) -> list[int]:
        """On the last stage: the `count` tokens of a step, to all who have not sampled them; `tokens` is None on ranks
        that have not, which learn them here."""
        if count == 0:
            return []
        sampled = self._among_cp(tokens, count)
        for stage in range(self._pp.size - 1):
            self._pp.send(sampled, stage)
        return list(sampled.tolist() if tokens is None else tokens)

    def _among_cp(self, tokens: Sequence[int] | None, count: int) -> Tensor:
        if tokens is None:
            return self._cp.recv((count,), torch.int64, 0)
        sampled = torch.tensor(tokens, dtype=torch.int64, device=self._device)
        for peer in range(1, self._cp.size):
            self._cp.send(sampled, peer)
        return sampled

    def expect(self, step: int, sequence_ids: list[int]) -> None:
        """`step` samples a token for each of `sequence_ids`; stages that do not sample will be told."""
        if sequence_ids and not self.is_last:
            self._unreceived.append((step, sequence_ids))

    def receive_tokens(self, through: int) -> Iterator[tuple[int, int]]:
        """(sequence id, token) of all steps up to `through` that were not received before."""
        while self._unreceived and self._unreceived[0][0] <= through:
            _, sequence_ids = self._unreceived.popleft()
            with self._waiting():
                tokens = self._pp.recv((len(sequence_ids),), torch.int64, self._pp.size - 1).tolist()
            yield from zip(sequence_ids, tokens, strict=True)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.waited_s += time.perf_counter() - began
