"""Construction of the token events of a sequence: new tokens, prompt logprobs, and the end of the request."""

from __future__ import annotations

from actors.engine.sequences.sequence import Sequence
from actors.wire.requests import FinishReason, TokenEvent, TokenLogprob
from actors.wire.results import PromptLogprobs


class ResultMismatch(RuntimeError):
    """Raised if a step result does not match its plan, so that engine and ranks are out of sync."""


def token_event(sequence: Sequence, token: int, logprobs: list[TokenLogprob]) -> TokenEvent:
    """Return the event that reports `token`, which was sampled and appended to a sequence, with its `logprobs` (empty unless
    requested).

    The first event of a sequence that asked for prompt logprobs carries them, and this call marks them as sent.
    """
    return TokenEvent(
        request_id=sequence.request.request_id,
        tokens=[token],
        logprobs=logprobs,
        prompt_logprobs=_of_prompt(sequence),
        cached_tokens=sequence.cached_tokens or 0,
    )


def end_event(sequence: Sequence, finish: FinishReason, error: str | None = None) -> TokenEvent:
    """Return the event that ends a sequence without another token, for the reason `finish`. `error` is the text of an error,
    for people. With ``length`` it carries prompt logprobs that were not sent yet, and marks them as sent."""
    return TokenEvent(
        request_id=sequence.request.request_id,
        prompt_logprobs=_of_prompt(sequence) if finish == "length" else None,
        cached_tokens=sequence.cached_tokens or 0,
        finish=finish,
        error=error,
    )


def add_prompt_logprobs(sequence: Sequence, scored: PromptLogprobs) -> None:
    """Store the prompt logprobs `scored` of one prompt chunk in the sequence. After a preemption, recomputed logprobs overwrite
    the earlier ones.

    Raises `ResultMismatch` if they refer to positions outside of the prompt, or to the first token, which has none.
    """
    stop = scored.first + len(scored.entries)
    if not 1 <= scored.first <= stop <= sequence.prompt_length:
        raise ResultMismatch(f"prompt logprobs for [{scored.first}, {stop}), the prompt has {sequence.prompt_length} tokens")
    sequence.prompt_logprobs[scored.first : stop] = scored.entries


def adopt(sequence: Sequence, event: TokenEvent) -> None:
    """Copy the prompt logprobs and the number of cached tokens into the sequence from `event`, with which a prefill engine
    reports the first token."""
    if sequence.prompt_logprobs and event.prompt_logprobs is not None:
        sequence.prompt_logprobs = event.prompt_logprobs
    sequence.cached_tokens = max(sequence.cached_tokens or 0, event.cached_tokens)


def unscored_error(sequence: Sequence) -> str:
    """Return the error text for a sequence whose prompt has run, but for which the ranks have left out some prompt logprobs."""
    return f"the ranks left out the logprobs of {sequence.prompt_logprobs[1:].count(None)} prompt tokens"


def _of_prompt(sequence: Sequence) -> list[TokenLogprob | None] | None:
    """Return the prompt logprobs for the first event that carries them, and None for all later ones."""
    if sequence.has_sent_prompt_logprobs or not sequence.prompt_logprobs:
        return None
    sequence.has_sent_prompt_logprobs = True
    return sequence.prompt_logprobs
