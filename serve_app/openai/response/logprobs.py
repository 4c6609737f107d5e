"""Log-probabilities in the formats of the two endpoints, always as finite numbers: JSON has no infinity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from actors.wire.requests import TokenLogprob
from serve_app.openai.response.delta import TokenEntry
from serve_app.text.tokenizer import Tokenizer

FLOOR = -9999.0
"""Value used for minus infinity (a token that was masked out)."""


def finite(logprob: float) -> float:
    """Returns a natural log-probability as a number that strict JSON can hold: at least `FLOOR`, which also stands for NaN, and
    at most 0."""
    return FLOOR if math.isnan(logprob) else min(0.0, max(FLOOR, logprob))


def label(tokenizer: Tokenizer | None, token: int) -> str:
    """Returns the token with the id `token` as readable text (see `Tokenizer.token_label`); ``token_id:N`` if there is no
    tokenizer."""
    return f"token_id:{token}" if tokenizer is None else tokenizer.token_label(token)


def completion(tokenizer: Tokenizer | None, entries: Sequence[TokenEntry], count: int) -> dict[str, Any]:
    """Returns the ``logprobs`` object of a completion choice with the tokens `entries`. The alternatives of each token are the
    `count` most likely tokens and the chosen one."""
    return {
        "tokens": [label(tokenizer, entry.token) for entry in entries],
        "token_logprobs": [None if entry.logprob is None else finite(entry.logprob.logprob) for entry in entries],
        "top_logprobs": [None if entry.logprob is None else _named(tokenizer, entry.logprob, count) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def chat(tokenizer: Tokenizer | None, entries: Sequence[TokenEntry], count: int) -> dict[str, Any]:
    """Returns the ``logprobs`` object of a chat choice with the tokens `entries`, without those whose log-probability is not
    known. The alternatives of each token are exactly the `count` most likely tokens (fewer in a small vocabulary)."""
    content = []
    for entry in entries:
        if entry.logprob is not None:
            top = [_one(tokenizer, *pair) for pair in best(entry.logprob, count)]
            content.append({**_one(tokenizer, entry.token, entry.logprob.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt(tokenizer: Tokenizer | None, found: Sequence[TokenLogprob | None], count: int) -> list[dict[str, Any] | None]:
    """Returns the ``prompt_logprobs`` in vLLM's format: for each prompt token, its alternatives (the `count` most likely tokens
    and its own) by token id in digits; None for the first token. `found` are the log-probabilities of the prompt's tokens."""
    return [None if entry is None else _ranked(tokenizer, entry, count) for entry in found]


def best(logprob: TokenLogprob, count: int) -> list[tuple[int, float]]:
    """Returns the `count` most likely alternatives in `logprob` as (token id, log-probability), most likely first, of equal
    ones the lower id first."""
    return sorted(logprob.top, key=lambda pair: (-finite(pair[1]), pair[0]))[:count]


def _named(tokenizer: Tokenizer | None, logprob: TokenLogprob, count: int) -> dict[str, float]:
    """Returns the alternatives by token text. If two tokens have the same text, the less likely one is named by its id, so that
    none is lost."""
    pairs = best(logprob, count)
    if logprob.token not in dict(pairs):
        pairs.append((logprob.token, logprob.logprob))
    named: dict[str, float] = {}
    for token, value in pairs:
        name = label(tokenizer, token)
        named[name if name not in named else f"token_id:{token}"] = finite(value)
    return named


def _one(tokenizer: Tokenizer | None, token: int, logprob: float) -> dict[str, Any]:
    data = None if tokenizer is None else list(tokenizer.token_bytes(token))
    return {"token": label(tokenizer, token), "logprob": finite(logprob), "bytes": data}


def _ranked(tokenizer: Tokenizer | None, logprob: TokenLogprob, count: int) -> dict[str, Any]:
    pairs = best(logprob, count)
    ranks: dict[int, int | None] = {token: rank for rank, (token, _) in enumerate(pairs, 1)}
    values = {**dict(pairs), logprob.token: logprob.logprob}
    return {
        str(token): {"logprob": finite(value), "rank": ranks.get(token), "decoded_token": label(tokenizer, token)}
        for token, value in values.items()
    }
