"""Messages between an ingress and an engine: the generation request, its sampling parameters, and its token events."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from actors.wire.kv import KVTicket
from actors.wire.message import Message

FinishReason = Literal["stop", "length", "abort", "deadline", "error", "lost", "handoff"]
"""Reason for which a request ended. ``lost``: the replica or its ranks are gone, so that another replica may continue it (see
`GenerateRequest.generated`). ``handoff``: a prefill pool has finished its part of the request; that event goes to the decode
pool, never to an ingress."""


class SamplingParams(Message):
    """Parameters that control how the next token is sampled.

    `seed` is always set: the ingress draws one if the caller gives none. `logprobs` and `prompt_logprobs` give the number of
    alternatives to report beside the chosen token, or None to report no log-probabilities.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Number of most likely tokens to sample from; 0 disables the limit."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = Field(default_factory=dict)
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    """Number of tokens to generate before any of `stop_token_ids` may be sampled."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request. They include the model's end-of-sequence tokens unless the caller ignores those."""


class GenerateRequest(Message):
    """A request to continue one sequence."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    """Maximum number of tokens to generate; 0 only scores the prompt."""
    generated: list[int] = Field(default_factory=list)
    """Tokens that a lost replica generated after `prompt`. The request continues behind them: they count towards `max_tokens`,
    ``min_tokens`` and the penalties, and no event repeats them or the prompt logprobs."""
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    """Scheduling priority; lower values are served first."""
    tenant: str = ""
    """Name of the tenant. The scheduler shares service fairly between tenants."""
    cache_salt: str = ""
    """Salt of the prefix cache: only requests with the same salt share blocks."""
    timeout_s: float | None = None
    """Seconds from arrival after which the request ends with finish reason ``deadline``."""
    reserves: bool = False
    """Whether a decode pool should issue a KV transfer ticket first. It issues none if the prompt is short or mostly cached."""
    ticket: KVTicket | None = None
    """The KV transfer ticket to fill: a prefill pool runs the prompt, samples one token, and sends both to the issuer of the
    ticket. None for an ordinary request."""


class TokenLogprob(Message):
    """Natural-log probability of a token, its rank-ordered alternatives, and its own rank (1 = most likely)."""

    token: int
    logprob: float
    rank: int | None = None
    top: list[tuple[int, float]] = Field(default_factory=list)


class TokenEvent(Message):
    """The outcome of one step for one request. Exactly one event of a request carries `finish`, and it is the last one."""

    request_id: str
    tokens: list[int] = Field(default_factory=list)
    logprobs: list[TokenLogprob] = Field(default_factory=list)
    """One entry per token if the request asked for logprobs, else empty."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One entry per prompt token (None for the first token), on the first event, if the request asked for prompt logprobs."""
    cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache."""
    finish: FinishReason | None = None
    stop_token: int | None = None
    """The token that stopped the request; it is also the last of `tokens`."""
    error: str | None = None
    refused: str | None = None
    """Code of the refusal, explained by `error`. Set on the only event of a request that was never accepted."""
    refused_by: str | None = None
    """Name of the replica that refused the request; another replica may accept it."""
    ticket: KVTicket | None = None
    """KV transfer ticket: the blocks are reserved, and the request can be sent to a prefill pool."""

    @property
    def is_empty(self) -> bool:
        """Whether this event has no tokens, finish reason, prompt logprobs or ticket, and so only confirms that a replica has
        admitted the request (or, to a decode engine, that it still works on it: a heartbeat)."""
        return not (self.tokens or self.finish or self.prompt_logprobs or self.ticket)


class TokenEvents(Message):
    """The token events of one step for the requests of one ingress."""

    events: list[TokenEvent]
