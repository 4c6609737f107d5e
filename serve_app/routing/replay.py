"""Replay: a request whose replica is lost continues on another replica, behind the tokens that its client already has.

    replica A   prompt ──→ t1 t2 t3 ✗
    replica B   prompt t1 t2 t3 ──→ t4 t5 …        one stream t1 t2 t3 t4 t5 … for the client

Sampling noise depends only on the seed and the position of a token, and the text of a choice is made in the HTTP process, so
that replica B needs nothing but the tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from actors.wire.requests import GenerateRequest, TokenEvent

MAX_REPLAYS = 16
"""Number of losses after which a request is given up, however far it came."""
MAX_FRUITLESS = 2
"""Number of consecutive replicas that may be lost while they have the request and before one of them generates a token. The
request itself is then the likely cause of the losses."""


class Replay:
    """The progress of one request over the replicas that it runs on, one after the other."""

    def __init__(
        self, request: GenerateRequest, wait_s: float, replay_wait_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`wait_s`: seconds that a new request may wait for a replica to take it, once one was lost or has refused;
        `replay_wait_s`: the same for a request that a replica had taken before it was lost."""
        self._request, self._clock = request, clock
        self._wait_s, self._replay_wait_s = wait_s, replay_wait_s
        self._began = clock()
        self._generated: list[int] = []
        self._has_scored = False
        self._is_taken = False
        self._is_fruitful = False
        self._fruitless = 0
        self._attempts = 0
        self._lost_at: float | None = None
        """The time since which no replica has the request; None while one has it."""
        self.num_replays = 0
        """Number of replicas that were lost after they had taken the request."""

    @property
    def was_taken(self) -> bool:
        """Whether a replica has taken the request, now or before: it is accepted, and may not be refused any more."""
        return self._is_taken or self.num_replays > 0

    def attempt(self) -> GenerateRequest | None:
        """Returns the request for the next replica, or None if its time limit has passed."""
        self._is_taken = self._is_fruitful = False
        left_s = None if self._request.timeout_s is None else self._request.timeout_s - (self._clock() - self._began)
        if left_s is not None and left_s <= 0:
            return None
        self._attempts += 1
        if self._attempts == 1:
            return self._request
        sampling = self._request.sampling
        if self._has_scored:
            sampling = sampling.model_copy(update={"prompt_logprobs": None})
        return self._request.model_copy(
            update={
                # A new name: events of a lost replica that are still on their way belong to no request.
                "request_id": f"{self._request.request_id}~{self._attempts}",
                "generated": list(self._generated),
                "sampling": sampling,
                "timeout_s": left_s,
            }
        )

    def on_event(self, event: TokenEvent) -> TokenEvent:
        """Note an event of the replica that has the request. Returns it as the caller should see it: tokens of the prompt that
        only a replay finds in a cache do not count as cached."""
        self._is_taken, self._lost_at = True, None
        if self.num_replays:
            event = event.model_copy(update={"cached_tokens": 0})
        self._is_fruitful |= bool(event.tokens)
        self._has_scored |= event.prompt_logprobs is not None
        self._generated += event.tokens
        return event

    def on_loss(self) -> str | None:
        """Note that the replica is lost. Returns None if the request may be replayed, else why not, as text for people."""
        self.on_refusal()
        if not self._is_taken:  # the replica was lost before it took the request
            return None if self.may_wait() else f"no replica took the request for {self._limit_s:g} s"
        self.num_replays += 1
        self._fruitless = 0 if self._is_fruitful else self._fruitless + 1
        if self._fruitless >= MAX_FRUITLESS:
            return f"{self._fruitless} replicas in turn were lost while they computed it, so it is not tried again"
        if self.num_replays > MAX_REPLAYS:
            return f"{self.num_replays} replicas were lost while they computed it"
        return None

    def on_refusal(self) -> None:
        """Note that no replica takes the request at present."""
        if self._lost_at is None:
            self._lost_at = self._clock()

    def may_wait(self) -> bool:
        """Whether the request may wait longer for a replica that takes it."""
        return self._lost_at is None or self._clock() - self._lost_at < self._limit_s

    @property
    def _limit_s(self) -> float:
        return self._replay_wait_s if self.was_taken else self._wait_s
