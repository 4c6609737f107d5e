"""The events of a sequence: those that carry its tokens, its prompt's logprobs, and its end."""

from __future__ import annotations

from actors.engine.sequences.sequence import Sequence
from actors.wire.requests import FinishReason, TokenEvent, TokenLogprob
from actors.wire.results import PromptLogprobs


class ResultMismatch(RuntimeError):
    """A step result that does not answer the plan: engine and ranks no longer agree."""


def token_event(sequence: Sequence, token: int, logprobs: list[TokenLogprob]) -> TokenEvent:
    """The event for a newly sampled token."""
    return TokenEvent(
        request_id=sequence.request.request_id,
        tokens=[token],
        logprobs=logprobs,
        prompt_logprobs=_of_prompt(sequence),
        cached_tokens=sequence.cached_tokens or 0,
    )


def end_event(sequence: Sequence, finish: FinishReason, error: str | None = None) -> TokenEvent:
    """The event that ends it without a token."""
    return TokenEvent(
        request_id=sequence.request.request_id,
        prompt_logprobs=_of_prompt(sequence) if finish == "length" else None,
        cached_tokens=sequence.cached_tokens or 0,
        finish=finish,
        error=error,
    )


def add_prompt_logprobs(sequence: Sequence, scored: PromptLogprobs) -> None:
    """Put a chunk's prompt logprobs in their places. A sequence recomputed after preemption overwrites its own.

    Raises `ResultMismatch` where they are of tokens that the prompt does not have.
    """
    stop = scored.first + len(scored.entries)
    if not 1 <= scored.first <= stop <= sequence.prompt_length:
        raise ResultMismatch(f"prompt logprobs for [{scored.first}, {stop}), the prompt has {sequence.prompt_length} tokens")
    sequence.prompt_logprobs[scored.first : stop] = scored.entries


def adopt(sequence: Sequence, event: TokenEvent) -> None:
    """Take over from the event with the first token, which another engine made, what that engine found out of the prompt."""
    if sequence.prompt_logprobs and event.prompt_logprobs is not None:
        sequence.prompt_logprobs = event.prompt_logprobs
    sequence.cached_tokens = max(sequence.cached_tokens or 0, event.cached_tokens)


def unscored_error(sequence: Sequence) -> str:
    """What is wrong with one whose prompt has run and is not scored whole."""
    return f"the ranks left out the logprobs of {sequence.prompt_logprobs[1:].count(None)} prompt tokens"


def _of_prompt(sequence: Sequence) -> list[TokenLogprob | None] | None:
    """The prompt's logprobs, once."""
    if sequence.has_sent_prompt_logprobs or not sequence.prompt_logprobs:
        return None
    sequence.has_sent_prompt_logprobs = True
    return sequence.prompt_logprobs
