"""Messages from the ranks to their engine: the result of a step (sampled tokens and prompt log-probabilities)."""

from __future__ import annotations

from pydantic import Field

from actors.wire.message import Message
from actors.wire.requests import TokenLogprob


class Sampled(Message):
    """The token sampled for one sequence. `logprob` is set only if the request asked for logprobs."""

    sequence_id: int
    token: int
    logprob: TokenLogprob | None = None
    error: str | None = None
    """Reason for which no token could be sampled (logits that are not finite). `token` is then meaningless, and the request
    ends with this error."""


class PromptLogprobs(Message):
    """Log-probabilities of the tokens at positions ``[first, first + len(entries))`` of a sequence."""

    sequence_id: int
    first: int
    entries: list[TokenLogprob]


class StepResult(Message):
    """The result of a step, of one DP rank or joined over all of them.

    `seconds` is the time that the sampling rank spent on the step; over several DP ranks, that of the slowest.
    """

    step: int
    sampled: list[Sampled] = Field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = Field(default_factory=list)
    seconds: float = 0.0
