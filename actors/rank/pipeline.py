"""Communication of pipeline stages (pipeline parallelism, PP): hidden states to the next stage, sampled tokens to all stages.

    stage 0 ──hidden──→ stage 1 ──hidden──→ stage 2 (samples)
       ↑                   ↑ ───────tokens────── │
       └───────────────────────tokens────────────┘

Sends do not block. Receives block, and happen as late as possible: hidden states are received when the stage is ready for them;
the tokens of a step when a plan refers to one of them, or once the engine is known to have the step's result (so that no
messages accumulate). A stage therefore computes while the next one does, and the first stage can embed a token that the engine
has not received yet.

Under context parallelism (CP) only the ranks of cp rank 0 sample. They send the tokens to the other cp ranks of the last stage
at once, and every rank of the last stage sends them to the ranks of its own pp group.
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
    """Communicates over the groups `pp`, whose ranks hold the same slice of successive stages, and `cp`."""

    def __init__(self, pp: Group, cp: Group, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.is_first, self.is_last = pp.rank == 0, pp.rank == pp.size - 1
        self.waited_s = 0.0
        """Seconds of host time spent waiting for other stages so far (on CUDA a receive returns as soon as it is queued)."""
        self.busy_s = 0.0
        """Seconds spent on steps so far, without `waited_s`; the runner adds them up."""
        self._pp, self._cp = pp, cp
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device
        self._unreceived: deque[tuple[int, list[int]]] = deque()
        """Steps whose tokens have not been received, oldest first, and the ids of the sequences sampled in each."""

    def receive(self, rows: int) -> Tensor | None:
        """Wait for hidden states `[rows, hidden]` of the previous stage and return them; None on the first stage.

        Nothing is sent for zero rows, so an empty tensor is returned at once. Raises `GroupError` if they do not arrive in
        time.
        """
        if self.is_first:
            return None
        if rows == 0:
            return torch.empty((0, self._hidden_size), dtype=self._dtype, device=self._device)
        with self._waiting():
            return self._pp.recv((rows, self._hidden_size), self._dtype, self._pp.rank - 1)

    def send(self, hidden: Tensor) -> None:
        """Send hidden states `[rows, hidden]` to the next stage, without waiting; does nothing for zero rows. Not called on the
        last stage."""
        if len(hidden):
            self._pp.send(hidden, self._pp.rank + 1)

    def publish_tokens(self, tokens: Sequence[int] | None, count: int) -> list[int]:
        """Send the `count` token ids of a step from the last stage to all ranks that have not sampled them, and return them.

        Called on every rank of the last stage. `tokens` is None on ranks that do not sample (cp rank above 0); these receive
        the tokens here.
        """
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
        """Record that the step number `step` samples a token for each of `sequence_ids`, in this order, for `receive_tokens`.
        Does nothing on the last stage, which samples them."""
        if sequence_ids and not self.is_last:
            self._unreceived.append((step, sequence_ids))

    def receive_tokens(self, through: int) -> Iterator[tuple[int, int]]:
        """Wait for the tokens of all expected steps up to the step number `through` that were not received before. Yields
        (sequence id, token id) pairs. The receives happen as the iterator advances."""
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
