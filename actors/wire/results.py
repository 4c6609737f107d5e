"""Messages from the ranks to their engine: what came out of a step."""

from __future__ import annotations

from pydantic import Field

from actors.wire.message import Message
from actors.wire.requests import TokenLogprob


class Sampled(Message):
    """The token sampled for one sequence; `logprob` only where the request asked for logprobs."""

    sequence_id: int
    token: int
    logprob: TokenLogprob | None = None
    error: str | None = None
    """Why no token could be sampled (logits not finite). `token` means nothing then, and the request ends with this."""


class PromptLogprobs(Message):
    """Log-probabilities of the tokens at positions ``[first, first + len(entries))`` of a sequence."""

    sequence_id: int
    first: int
    entries: list[TokenLogprob]


class StepResult(Message):
    """What came out of a step, on one DP rank or on all. `seconds` is the time the (slowest) sampling rank spent on it."""

    step: int
    sampled: list[Sampled] = Field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = Field(default_factory=list)
    seconds: float = 0.0
