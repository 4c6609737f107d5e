"""Admission control: validates requests, and refuses them at once with a typed error before any part of them has run."""

from __future__ import annotations

from actors.engine.config.engine_config import EngineConfig
from actors.wire.requests import GenerateRequest
from placement.model.errors import ReportedError

_LARGEST_TOKEN = 2**31


class RequestRefused(ReportedError):
    """Raised if a request is not accepted; no event follows. `code` is stable, and ``str()`` is a text for people."""

    code = "refused"


class InvalidRequest(RequestRefused):
    """Raised if a field of the request has a value that this engine can never serve."""

    code = "invalid_request"

    def __init__(self, field: str, value: object, rule: str) -> None:
        super().__init__(f"{field}={value!r}: {rule}")
        self.field, self.value, self.rule = field, value, rule


class PromptTooLong(RequestRefused):
    """Raised if the prompt would not fit even if it ran alone."""

    code = "prompt_too_long"

    def __init__(self, prompt_tokens: int, longest: int, max_model_len: int, cache_tokens: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens; at most {longest} fit "
            f"(model length {max_model_len}, KV cache {cache_tokens} tokens, less the tokens to generate)"
        )
        self.prompt_tokens, self.longest = prompt_tokens, longest
        self.max_model_len, self.cache_tokens = max_model_len, cache_tokens


class EngineBusy(RequestRefused):
    """Raised if the waiting queue is full. A later attempt can succeed."""

    code = "engine_busy"

    def __init__(self, what: str, waiting: int, limit: int) -> None:
        super().__init__(f"{waiting} {what} are waiting already; the limit is {limit}")
        self.what, self.waiting, self.limit = what, waiting, limit


class DuplicateRequest(RequestRefused):
    """Raised if a request with the same id is already being served."""

    code = "duplicate_request"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request_id={request_id!r} is being served already; every request needs its own id")
        self.request_id = request_id


class EngineDown(RequestRefused):
    """Raised if the engine is not serving: it was not started, it was closed, or its ranks are lost."""

    code = "engine_down"

    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine is down: {reason}")
        self.reason = reason


def check_request(request: GenerateRequest, config: EngineConfig) -> None:
    """Raise an error if `request` can never be served by an engine with `config`; return nothing otherwise.

    Raises `PromptTooLong` unless the prompt, the tokens generated so far and one more (none if ``max_tokens=0``) fit both the
    model length and the whole KV cache. Raises `InvalidRequest` for an empty prompt, a negative `max_tokens` or one that the
    generated tokens have used up, a `timeout_s` of 0 or less, a token id outside the vocabulary, and KV transfer fields that
    the engine cannot serve.
    """
    if not request.prompt:
        raise InvalidRequest("prompt", [], "must hold at least one token")
    if request.max_tokens < 0:
        raise InvalidRequest("max_tokens", request.max_tokens, "must be 0 or more")
    if request.generated and len(request.generated) >= request.max_tokens:
        raise InvalidRequest("generated", len(request.generated), f"must be fewer than max_tokens={request.max_tokens}")
    if request.timeout_s is not None and not request.timeout_s > 0:
        raise InvalidRequest("timeout_s", request.timeout_s, "must be above 0")
    _check_handoff(request, config)
    _check_tokens("prompt", request.prompt, config)
    _check_tokens("generated", request.generated, config)
    _check_tokens("logit_bias", list(request.sampling.logit_bias), config)
    longest = config.capacity - min(1, request.max_tokens)
    tokens = len(request.prompt) + len(request.generated)
    if tokens > longest:
        raise PromptTooLong(tokens, longest, config.max_model_len, config.cache_tokens)


def _check_handoff(request: GenerateRequest, config: EngineConfig) -> None:
    ticket, tokens = request.ticket, len(request.prompt)
    for field, asked in (("reserves", request.reserves), ("ticket", ticket is not None)):
        if asked and config.disaggregation is None:
            raise InvalidRequest(field, asked, "this engine belongs to no pool, so it hands off nothing and takes nothing")
        if asked and request.generated:
            raise InvalidRequest(field, asked, "a request that continues after a loss is not handed off")
    if ticket is None:
        return
    if request.reserves:
        raise InvalidRequest("reserves", True, "a request has a ticket, or asks for one")
    if ticket.ticket_id != request.request_id:
        raise InvalidRequest("ticket_id", ticket.ticket_id, f"must be the request's own id, {request.request_id!r}")
    if request.max_tokens < 1:
        raise InvalidRequest("max_tokens", request.max_tokens, "with a ticket one token is sampled")
    room = len(ticket.blocks) * ticket.page_tokens
    if not 0 <= ticket.first < ticket.tokens == tokens <= room:
        raise InvalidRequest(
            "ticket",
            f"positions {ticket.first}..{ticket.tokens} in {len(ticket.blocks)} blocks of {ticket.page_tokens}",
            f"must be the end of a prompt of {tokens} tokens, with blocks for all of it",
        )


def _check_tokens(field: str, tokens: list[int], config: EngineConfig) -> None:
    limit = config.vocab_size or _LARGEST_TOKEN
    if tokens and not (min(tokens) >= 0 and max(tokens) < limit):
        wrong = next(token for token in tokens if not 0 <= token < limit)
        raise InvalidRequest(field, wrong, f"token ids are 0 to {limit - 1}")
