"""Messages between an ingress and an engine: a request to generate, and the events of its tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from actors.wire.kv import KVTicket
from actors.wire.message import Message

FinishReason = Literal["stop", "length", "abort", "deadline", "error", "handoff"]
"""``handoff``: what a prefill pool was to do is done; its last event goes to the decode pool, never to an ingress."""


class SamplingParams(Message):
    """How the next token is chosen. `seed` is always set: the ingress draws one where the caller gave none.

    `logprobs` and `prompt_logprobs`: None for none, else the number of alternatives beside the chosen token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = Field(default_factory=dict)
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    """Until this many tokens are out, `stop_token_ids` cannot be chosen."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request (the model's end tokens included, unless the caller ignores them)."""


class GenerateRequest(Message):
    """One sequence to continue. The prompt may hold tokens that were already sent to the client (a replay)."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    """Tokens to generate at most; 0 scores the prompt only."""
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    """Lower is served first."""
    tenant: str = ""
    """Fairness is kept between tenants."""
    cache_salt: str = ""
    """Prefix-cache blocks are shared only between requests with the same salt."""
    timeout_s: float | None = None
    """Seconds from arrival after which the request ends with finish reason ``deadline``."""
    reserves: bool = False
    """Ask a decode pool for a ticket first. It gives none where the prompt is short, or mostly in its cache."""
    ticket: KVTicket | None = None
    """Ask a prefill pool to run the prompt, sample one token, and hand both to who gave the ticket."""


class TokenLogprob(Message):
    """Natural-log probability of a token, its rank-ordered alternatives, and its own rank (1 = most likely)."""

    token: int
    logprob: float
    rank: int | None = None
    top: list[tuple[int, float]] = Field(default_factory=list)


class TokenEvent(Message):
    """What happened to a request in one step. Exactly one event of a request carries `finish`, and it is the last."""

    request_id: str
    tokens: list[int] = Field(default_factory=list)
    logprobs: list[TokenLogprob] = Field(default_factory=list)
    """One per token where logprobs were asked for, else empty."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One per prompt token (None for the first), on the first event, where asked for."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    finish: FinishReason | None = None
    stop_token: int | None = None
    """The token that stopped the request; it is also the last of `tokens`."""
    error: str | None = None
    refused: str | None = None
    """On the only event of a request that was never accepted: the code of the refusal, explained by `error`."""
    refused_by: str | None = None
    """Name of the replica that refused; another may accept."""
    ticket: KVTicket | None = None
    """Blocks are reserved: a prefill pool may have the request."""

    @property
    def is_empty(self) -> bool:
        """Whether this event only says that a replica has the request."""
        return not (self.tokens or self.finish or self.prompt_logprobs or self.ticket)


class TokenEvents(Message):
    """What happened in one step to the requests of one ingress."""

    events: list[TokenEvent]
