"""Turns a request's fields into one `GenerateRequest` for each choice.

prompts p0, p1, n=2   →   choices   0: p0   1: p0   2: p1   3: p1
                          seeds     s       s+1     s       s+1
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from actors.wire.requests import GenerateRequest, SamplingParams
from serve_app.deployment.served_model import ServedModel
from serve_app.openai.request.errors import invalid, too_long
from serve_app.openai.request.prompts import Prompt, check_ids
from serve_app.openai.request.schema import GenerationFields
from serve_app.openai.request.settings import ApiSettings

_SEED_MASK = 2**63 - 1


@dataclass(frozen=True)
class ChoiceRequest:
    """One sequence of an answer. `first`: whether it is the first of its prompt's choices, which accounts for the prompt's
    tokens."""

    index: int
    first: bool
    prompt: Prompt
    request: GenerateRequest


@dataclass(frozen=True)
class Asked:
    """Fields that have different names in the two endpoints. `default_max`: default for `max_tokens`; None: as many as fit the
    context."""

    max_tokens: int | None
    default_max: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    prompt_field: str = "prompt"
    max_field: str = "max_tokens"
    least_max: int = 0


@dataclass(frozen=True)
class Origin:
    """The origin of a request: its id (unique in the engine) and the caller's time limit."""

    request_id: str
    timeout_s: float | None


def plan(
    model: ServedModel, settings: ApiSettings, fields: GenerationFields, asked: Asked, prompts: list[Prompt], origin: Origin
) -> list[ChoiceRequest]:
    """Returns the engine requests of an answer, one for each choice, by index: ``n`` for each of `prompts`, with the seeds s,
    s+1, … for each prompt (s is random if not given).

    `asked` are the fields that the two endpoints name differently, and `origin` is the request's id and time limit. Fewer
    tokens are generated than requested if the context has no room for more. Raises `ApiError` (400) if a prompt fills the
    context, or fields are out of range, contradict each other or are not supported by the model.
    """
    _check(model, settings, fields, asked, len(prompts))
    seed = secrets.randbits(63) if fields.seed is None else fields.seed & _SEED_MASK
    sampling = _sampling(model, fields, asked)
    choices: list[ChoiceRequest] = []
    for prompt in prompts:
        max_tokens = _max_tokens(model, asked, len(prompt.ids))
        if fields.min_tokens > max_tokens:
            raise invalid("min_tokens", f"{fields.min_tokens} is more than the {max_tokens} tokens there may be")
        for turn in range(fields.n):
            request = GenerateRequest(
                request_id=f"{origin.request_id}-{len(choices)}",
                prompt=prompt.ids,
                max_tokens=max_tokens,
                sampling=sampling.model_copy(update={"seed": (seed + turn) & _SEED_MASK}),
                priority=fields.priority,
                tenant=fields.user,
                cache_salt=fields.cache_salt,
                timeout_s=origin.timeout_s,
            )
            choices.append(ChoiceRequest(len(choices), turn == 0, prompt, request))
    return choices


def _check(model: ServedModel, settings: ApiSettings, fields: GenerationFields, asked: Asked, num_prompts: int) -> None:
    if fields.best_of not in (None, fields.n):
        raise invalid("best_of", f"must equal n ({fields.n}): all choices are returned", "unsupported_value")
    if num_prompts * fields.n > settings.max_choices:
        raise invalid("n", f"{num_prompts} prompts times n {fields.n} is more than {settings.max_choices} choices")
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options", "only goes with stream: true")
    if model.tokenizer is None and fields.stops:
        raise invalid("stop", "this model has no tokenizer, so there is no text to search: use stop_token_ids")
    for name, count in (("logprobs", asked.logprobs), ("prompt_logprobs", fields.prompt_logprobs)):
        if count is not None and count > settings.max_logprobs:
            raise invalid(name, f"{count} is more than the {settings.max_logprobs} alternatives a token may have")
    if asked.max_tokens is not None and asked.max_tokens < asked.least_max:
        raise invalid(asked.max_field, f"must be at least {asked.least_max}, not {asked.max_tokens}")


def _max_tokens(model: ServedModel, asked: Asked, prompt_tokens: int) -> int:
    """Returns the number of tokens to generate: the requested number, or the room left in the context if that is less."""
    room = model.max_model_len - prompt_tokens
    if room <= 0:
        raise too_long(asked.prompt_field, model.max_model_len, prompt_tokens, asked.max_tokens)
    wanted = asked.default_max if asked.max_tokens is None else asked.max_tokens
    return room if wanted is None else min(wanted, room)


def _sampling(model: ServedModel, fields: GenerationFields, asked: Asked) -> SamplingParams:
    ends = () if fields.ignore_eos else model.eos_token_ids
    stops = check_ids(model, fields.stop_token_ids, "stop_token_ids")
    return SamplingParams(
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=max(0, fields.top_k),
        min_p=fields.min_p,
        repetition_penalty=fields.repetition_penalty,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        logit_bias=_logit_bias(model, fields),
        logprobs=_at_most(asked.logprobs, model.vocab_size),
        prompt_logprobs=_at_most(asked.prompt_logprobs, model.vocab_size),
        min_tokens=fields.min_tokens,
        stop_token_ids=tuple(dict.fromkeys((*ends, *stops))),
    )


def _logit_bias(model: ServedModel, fields: GenerationFields) -> dict[int, float]:
    """Returns the logit bias by token id; in JSON, the keys are the ids in digits."""
    if not all(key.isascii() and key.isdigit() and len(key) < 12 for key in fields.logit_bias):
        raise invalid("logit_bias", "keys are token ids in digits")
    bias = {int(key): value for key, value in fields.logit_bias.items()}
    check_ids(model, list(bias), "logit_bias")
    return bias


def _at_most(count: int | None, limit: int) -> int | None:
    return None if count is None else min(count, limit)
