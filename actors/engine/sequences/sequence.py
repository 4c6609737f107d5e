"""The state of one request in the engine: its tokens, KV blocks and progress."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from actors.engine.kv.prefix import PrefixChain
from actors.wire.requests import FinishReason, GenerateRequest, TokenLogprob
from placement.model.spec import RopeSpec

NOT_ON_RANKS = -1
"""The sequence id of a sequence that the ranks do not hold."""
_PLAIN_ROPE = RopeSpec()


class State(Enum):
    """The scheduling state of a sequence."""

    WAITING = "waiting"
    RESERVED = "reserved"
    """The sequence has blocks, and waits for a KV tier or a prefill pool to fill them."""
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """The tokens of a request and their progress.

    Planned and computed tokens are counted separately: a plan advances `num_planned`, and its result advances `num_computed`::

        tokens   [ p p p p p p p p p g g ? ]      ?: being sampled by a plan in flight (`num_awaited`)
        computed  ───────────→|
        planned   ─────────────────────→|         in flight: between the two;  todo: after `num_planned`
    """

    request: GenerateRequest
    arrival_s: float
    order: int
    """Unique number that increases with arrival; it breaks every tie."""
    tokens: list[int]
    chain: PrefixChain
    prompt_logprobs: list[TokenLogprob | None]
    state: State = State.WAITING
    sequence_id: int = NOT_ON_RANKS
    """Id of the sequence on the ranks; it changes after every preemption."""
    dp_rank: int = 0
    """DP rank on which the sequence runs; it is chosen again after every preemption."""
    num_planned: int = 0
    num_computed: int = 0
    num_awaited: int = 0
    """Number of tokens that plans in flight sample. The ranks have them before the engine does."""
    last_step: int = -1
    """Step of the newest plan with this sequence."""
    num_tokens_on_ranks: int = 0
    """Number of tokens that the ranks hold once all plans so far have run."""
    blocks: list[int] = field(default_factory=list)
    num_blocks_on_ranks: int = 0
    num_registered: int = 0
    """Number of blocks registered in the prefix cache."""
    cached_tokens: int | None = None
    """Number of tokens found in the prefix cache at the first admission; None before that."""
    preemptions: int = 0
    overdue: bool = False
    rope_length: int = 0
    """See `RopeSpec.deciding_length`."""
    has_sent_prompt_logprobs: bool = False
    """Whether an event with the prompt's logprobs was sent."""
    reserves: bool = False
    """Whether a prefill pool may compute the prompt. This is tried only once."""
    skips_tiers: bool = False
    """Whether the KV tiers are not asked for blocks again, because they were late for this sequence."""
    spare_tokens: int = 0
    """Number of output tokens for which blocks are allocated on admission."""

    @classmethod
    def of(
        cls,
        request: GenerateRequest,
        block_size: int,
        arrival_s: float,
        order: int,
        rope: RopeSpec = _PLAIN_ROPE,
        capacity: int = 1 << 62,
        expected_tokens: int = 0,
    ) -> Sequence:
        """Return a new, waiting sequence that holds the prompt and the generated tokens of `request`, which arrived at
        `arrival_s` (seconds on the engine's clock). `block_size` is in tokens; `order` is a unique number that increases with
        arrival.

        `rope` is that of the model, and `capacity` the maximum number of tokens of a sequence in this engine. `expected_tokens`
        is the number of output tokens for which blocks are allocated on admission if a prefill pool may compute the prompt.
        This hashes the prompt, so it is best called outside of the engine's thread.
        """
        prompt_length = len(request.prompt)
        rope_length = rope.deciding_length(prompt_length, min(prompt_length + request.max_tokens, capacity))
        if request.ticket is not None:  # the keys are for another engine, whose capacity may differ
            rope_length = request.ticket.rope_length
        chain = PrefixChain(request.cache_salt, block_size, rope.length_class(rope_length))
        tokens = request.prompt + request.generated
        chain.extend(tokens)
        gathered: list[TokenLogprob | None] = (
            [None] * len(request.prompt) if request.sampling.prompt_logprobs is not None else []
        )
        return cls(
            request,
            arrival_s,
            order,
            tokens,
            chain,
            gathered,
            rope_length=rope_length,
            has_sent_prompt_logprobs=bool(request.generated),
            reserves=request.reserves,
            spare_tokens=min(request.max_tokens, expected_tokens) if request.reserves else 0,
        )

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self.request.prompt)

    @property
    def num_generated(self) -> int:
        """Number of generated tokens, excluding those that plans in flight sample."""
        return len(self.tokens) - self.prompt_length

    @property
    def length(self) -> int:
        """Number of tokens, including those that plans in flight sample."""
        return len(self.tokens) + self.num_awaited

    @property
    def todo(self) -> int:
        """Number of tokens that no plan has run yet: 1 while decoding."""
        return self.length - self.num_planned

    def is_sampled_out(self, capacity: int) -> bool:
        """Return whether the plans in flight already sample the last token that this sequence can have in this engine.
        `capacity` is the maximum number of tokens of any sequence here."""
        most = self.request.max_tokens if self.request.ticket is None else 1
        full = self.length - self.prompt_length >= most or self.length >= capacity
        return self.num_awaited > 0 and full

    @property
    def deadline_s(self) -> float:
        """Time at which the request ends with ``deadline``, in seconds on the engine's clock; infinite if it has no
        deadline."""
        timeout = math.inf if self.request.timeout_s is None else self.request.timeout_s
        lease = math.inf if self.request.ticket is None else self.request.ticket.lease_s
        return self.arrival_s + min(timeout, lease)

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt logprobs are requested and not complete. Every prompt token must then be run, cached or not."""
        return not self.has_sent_prompt_logprobs and None in self.prompt_logprobs[1:]

    @property
    def is_empty_work(self) -> bool:
        """Whether the request has nothing to sample (``max_tokens=0``) and no prompt tokens left to score."""
        return self.request.max_tokens == 0 and not self.scores_prompt

    @property
    def urgency(self) -> tuple[bool, int, int]:
        """Sort key (not overdue, priority, arrival order): sequences with smaller values run first and are preempted last. It
        is fixed while the sequence runs."""
        return (not self.overdue, 0 if self.overdue else self.request.priority, self.order)

    def finish_after(self, token: int, capacity: int) -> FinishReason | None:
        """Return the reason for which `token`, the last of `tokens`, ends the sequence in this engine, or None if it does not.
        `capacity` is the maximum number of tokens of any sequence here.

        A sequence with a KV transfer ticket ends with ``handoff``, and continues in the decode engine.
        """
        if self.request.ticket is not None:
            return "handoff"
        sampling = self.request.sampling
        if token in sampling.stop_token_ids and self.num_generated > sampling.min_tokens:
            return "stop"
        if self.num_generated >= self.request.max_tokens or len(self.tokens) >= capacity:
            return "length"
        return None

    def forget_ranks(self) -> None:
        """Reset the sequence to one that no rank holds: no id on the ranks, no blocks, nothing planned or computed. Its tokens
        are kept, and its blocks are not freed here."""
        self.sequence_id = NOT_ON_RANKS
        self.num_planned = self.num_computed = self.num_tokens_on_ranks = self.num_awaited = 0
        self.last_step = -1
        self.blocks = []
        self.num_blocks_on_ranks = self.num_registered = self.spare_tokens = 0
