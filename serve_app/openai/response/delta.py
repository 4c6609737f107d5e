"""The increments (deltas) of one choice of an answer. Streamed and whole answers are both made from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from actors.wire.requests import TokenLogprob

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class TokenEntry:
    """A token of the answer. `offset`: number of characters of the choice's text before it; `logprob`: None if not known."""

    token: int
    offset: int
    logprob: TokenLogprob | None = None


@dataclass
class Delta:
    """One increment of a choice. `entries` begin with the prompt's tokens if these are echoed; `generated` counts the others.

    `stop_reason`: the stop string or the additional stop token that ended the choice.
    """

    index: int
    text: str = ""
    entries: list[TokenEntry] = field(default_factory=list)
    generated: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0
    finish: Finish | None = None
    stop_reason: int | str | None = None


def join(index: int, deltas: Iterable[Delta]) -> Delta:
    """Returns one delta that contains all `deltas` of the choice `index`: texts and tokens in order, and the last known value
    of the other fields."""
    whole, texts = Delta(index), []
    for delta in deltas:
        texts.append(delta.text)
        whole.entries += delta.entries
        whole.generated += delta.generated
        whole.prompt_logprobs = delta.prompt_logprobs or whole.prompt_logprobs
        whole.cached_tokens = max(whole.cached_tokens, delta.cached_tokens)
        whole.finish = delta.finish or whole.finish
        whole.stop_reason = delta.stop_reason if delta.stop_reason is not None else whole.stop_reason
    whole.text = "".join(texts)
    return whole
