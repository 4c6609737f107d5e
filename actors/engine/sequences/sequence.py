"""One request on its way through the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from actors.engine.kv.prefix import PrefixChain
from actors.wire.requests import FinishReason, GenerateRequest, TokenLogprob
from placement.model.spec import RopeSpec

NOT_ON_RANKS = -1
"""The sequence id of a sequence the ranks do not know."""
_PLAIN_ROPE = RopeSpec()


class State(Enum):
    WAITING = "waiting"
    RESERVED = "reserved"
    """It has blocks, and waits for others to fill them."""
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens of a request and how far they are.

    Planned and computed are kept apart: a plan moves `num_planned`, its result moves `num_computed`::

        tokens   [ p p p p p p p p p g g ? ]      ?: being sampled by a plan in flight (`num_awaited`)
        computed  ───────────→|
        planned   ─────────────────────→|         in flight: between the two;  todo: what lies behind
    """

    request: GenerateRequest
    arrival_s: float
    order: int
    """Unique and rising with arrival; decides every tie."""
    tokens: list[int]
    chain: PrefixChain
    prompt_logprobs: list[TokenLogprob | None]
    state: State = State.WAITING
    sequence_id: int = NOT_ON_RANKS
    """The ranks' name for it; a new one after every preemption."""
    dp_rank: int = 0
    """Where it runs; chosen anew after every preemption."""
    num_planned: int = 0
    num_computed: int = 0
    num_awaited: int = 0
    """Tokens that plans in flight sample; the ranks will know them before the engine does."""
    last_step: int = -1
    """The newest plan it is in."""
    num_tokens_on_ranks: int = 0
    """Tokens the ranks know once all plans so far have run."""
    blocks: list[int] = field(default_factory=list)
    num_blocks_on_ranks: int = 0
    num_registered: int = 0
    """Blocks offered to the prefix cache."""
    cached_tokens: int | None = None
    """Tokens found in the prefix cache when first admitted."""
    preemptions: int = 0
    overdue: bool = False
    rope_length: int = 0
    """See `RopeSpec.deciding_length`."""
    has_sent_prompt_logprobs: bool = False
    """An event with the prompt's logprobs is out."""
    reserves: bool = False
    """Its prompt may be computed by a prefill pool; not a second time."""
    skips_tiers: bool = False
    """Its blocks did not come from the tiers in time: it does not ask them again."""
    spare_tokens: int = 0
    """Tokens of output for which it gets blocks at once."""

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
        """A sequence that holds the prompt. Hashes it, so it is best made outside the engine's thread.

        `expected_tokens`: tokens of output for which a prompt that a prefill pool computes gets blocks at once.
        """
        prompt_length = len(request.prompt)
        rope_length = rope.deciding_length(prompt_length, min(prompt_length + request.max_tokens, capacity))
        if request.ticket is not None:  # the keys are for an engine whose capacity may be another
            rope_length = request.ticket.rope_length
        chain = PrefixChain(request.cache_salt, block_size, rope.length_class(rope_length))
        chain.extend(request.prompt)
        gathered: list[TokenLogprob | None] = (
            [None] * len(request.prompt) if request.sampling.prompt_logprobs is not None else []
        )
        return cls(
            request,
            arrival_s,
            order,
            list(request.prompt),
            chain,
            gathered,
            rope_length=rope_length,
            reserves=request.reserves,
            spare_tokens=min(request.max_tokens, expected_tokens) if request.reserves else 0,
        )

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def length(self) -> int:
        """Tokens it has, awaited ones included."""
        return len(self.tokens) + self.num_awaited

    @property
    def todo(self) -> int:
        """Tokens that no plan has run yet: 1 while decoding."""
        return self.length - self.num_planned

    def is_sampled_out(self, capacity: int) -> bool:
        """Whether the plans in flight sample all the tokens it can have here."""
        most = self.request.max_tokens if self.request.ticket is None else 1
        full = self.length - self.prompt_length >= most or self.length >= capacity
        return self.num_awaited > 0 and full

    @property
    def deadline_s(self) -> float:
        timeout = math.inf if self.request.timeout_s is None else self.request.timeout_s
        lease = math.inf if self.request.ticket is None else self.request.ticket.lease_s
        return self.arrival_s + min(timeout, lease)

    @property
    def scores_prompt(self) -> bool:
        """Prompt logprobs are asked for and not all here: every prompt token must be run, cached or not."""
        return not self.has_sent_prompt_logprobs and None in self.prompt_logprobs[1:]

    @property
    def is_empty_work(self) -> bool:
        """Nothing to sample and nothing to score."""
        return self.request.max_tokens == 0 and not self.scores_prompt

    @property
    def urgency(self) -> tuple[bool, int, int]:
        """Smaller runs first and is preempted last. Fixed while the sequence runs."""
        return (not self.overdue, 0 if self.overdue else self.request.priority, self.order)

    def finish_after(self, token: int, capacity: int) -> FinishReason | None:
        """Whether `token`, which is the last of `tokens`, ends the sequence here: one with a ticket goes on elsewhere."""
        if self.request.ticket is not None:
            return "handoff"
        sampling = self.request.sampling
        if token in sampling.stop_token_ids and self.num_generated > sampling.min_tokens:
            return "stop"
        if self.num_generated >= self.request.max_tokens or len(self.tokens) >= capacity:
            return "length"
        return None

    def forget_ranks(self) -> None:
        """Forget all that the ranks hold of it; the tokens stay."""
        self.sequence_id = NOT_ON_RANKS
        self.num_planned = self.num_computed = self.num_tokens_on_ranks = self.num_awaited = 0
        self.last_step = -1
        self.blocks = []
        self.num_blocks_on_ranks = self.num_registered = self.spare_tokens = 0
