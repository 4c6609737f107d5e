"""``/v1/completions``: from request fields to a job, and from deltas to JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.deployment.served_model import ServedModel
from serve_app.openai.request.plan import Asked, ChoiceRequest, Origin, plan
from serve_app.openai.request.prompts import completion_prompts
from serve_app.openai.request.schema import CompletionFields
from serve_app.openai.request.settings import ApiSettings
from serve_app.openai.response import logprobs
from serve_app.openai.response.delta import Delta
from serve_app.openai.response.response_builder import Job, ResponseEnvelope
from serve_app.openai.response.writing import writing
from serve_app.text.tokenizer import Tokenizer

_DEFAULT_MAX_TOKENS = 16


async def job(model: ServedModel, settings: ApiSettings, fields: CompletionFields, origin: Origin, created: int) -> Job:
    """Returns the checked job of a completion request, with its prompts as token ids.

    `origin` is the request's id and time limit; `created` is the time in the answer, in seconds since 1970. Raises `ApiError`
    (400) for fields that are not valid for this model, or a prompt that is too long.
    """
    asked = Asked(
        max_tokens=fields.max_tokens,
        default_max=_DEFAULT_MAX_TOKENS,
        logprobs=fields.logprobs,
        prompt_logprobs=_prompt_logprobs(fields),
    )
    choices = plan(model, settings, fields, asked, await completion_prompts(model, fields), origin)
    envelope = ResponseEnvelope(f"cmpl-{origin.request_id}", model.name, created)
    options = fields.stream_options
    return Job(
        endpoint="completions",
        choices=choices,
        writing=writing(model, fields, echo=fields.echo),
        response_builder=CompletionResponseBuilder(envelope, model.tokenizer, fields, choices),
        stream=fields.stream,
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.continuous_usage_stats,
    )


@dataclass(frozen=True)
class CompletionResponseBuilder:
    """The JSON of completions. Without a tokenizer, or with ``return_token_ids``, the choices carry token ids."""

    envelope: ResponseEnvelope
    tokenizer: Tokenizer | None
    fields: CompletionFields
    choices: Sequence[ChoiceRequest]

    @property
    def shows_tokens(self) -> bool:
        """See `ResponseBuilder.shows_tokens`. True if logprobs or token ids were requested, or if there is no tokenizer."""
        return self.fields.logprobs is not None or self.fields.return_token_ids or self.tokenizer is None

    def opening(self, choice: ChoiceRequest) -> list[dict[str, Any]]:
        """See `ResponseBuilder.opening`. Returns no chunks."""
        return []

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """See `ResponseBuilder.chunk`. The last chunk of a choice has its prompt's token ids, if token ids were requested."""
        return self.envelope.object("text_completion", [self._choice(delta)])

    def last(self) -> dict[str, Any]:
        """See `ResponseBuilder.last`."""
        return self.envelope.object("text_completion", [])

    def whole(self, choices: Sequence[Delta]) -> dict[str, Any]:
        """See `ResponseBuilder.whole`."""
        return self.envelope.object("text_completion", [self._choice(choice) for choice in choices])

    def _choice(self, delta: Delta) -> dict[str, Any]:
        wanted = self.fields.logprobs
        body: dict[str, Any] = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": None if wanted is None else logprobs.completion(self.tokenizer, delta.entries, wanted),
            "finish_reason": delta.finish,
            "stop_reason": delta.stop_reason,
        }
        if self.fields.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            body["prompt_logprobs"] = logprobs.prompt(self.tokenizer, delta.prompt_logprobs, self.fields.prompt_logprobs)
        if self.fields.return_token_ids or self.tokenizer is None:
            body["token_ids"] = [entry.token for entry in delta.entries]
        if self.fields.return_token_ids and delta.finish:
            body["prompt_token_ids"] = self.choices[delta.index].prompt.ids
        return body


def _prompt_logprobs(fields: CompletionFields) -> int | None:
    """Returns the number of prompt logprobs to compute: echoed tokens have logprobs like generated ones."""
    wanted = [fields.prompt_logprobs] if fields.prompt_logprobs is not None else []
    if fields.echo and fields.logprobs is not None:
        wanted.append(fields.logprobs)
    return max(wanted, default=None)
