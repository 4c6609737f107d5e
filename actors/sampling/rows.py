"""The input and output of the sampler for one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.wire.requests import SamplingParams, TokenLogprob

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow fp32 before it changed the choice."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One sequence whose next token is sampled. `tokens` are its prompt and output so far; the sampler only reads them."""

    sampling: SamplingParams
    tokens: Sequence[int]
    prompt_length: int

    @property
    def position(self) -> int:
        """Position in the sequence (from 0) of the token being sampled. The sampling noise is a function of it."""
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        """Number of tokens generated so far, without the prompt."""
        return len(self.tokens) - self.prompt_length


@dataclass(frozen=True, slots=True)
class SampleResult:
    """The token sampled for one row.

    `error` is set if no token could be chosen (NaN or infinite logits, everything masked). The token is then 0, an ordinary id
    that must not be emitted: the request ends with the error. Other rows of the step are not affected.
    """

    token: int
    logprob: TokenLogprob | None = None
    error: str | None = None


def is_greedy(sampling: SamplingParams) -> bool:
    """Whether these parameters always choose the most likely token, whatever the seed: temperature below `GREEDY_BELOW`, or
    top_k 1."""
    return sampling.temperature < GREEDY_BELOW or sampling.top_k == 1


def is_edited(row: SampleRow) -> bool:
    """Whether the row's logits are modified before temperature and filters: by a logit bias, a penalty, or stop tokens masked
    before `min_tokens`."""
    params = row.sampling
    return bool(
        params.logit_bias
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or (params.stop_token_ids and row.num_output < params.min_tokens)
    )
