"""``/v1/chat/completions``: from request fields to a job, and from deltas to JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.deployment.served_model import ServedModel
from serve_app.openai.request.errors import invalid
from serve_app.openai.request.plan import Asked, ChoiceRequest, Origin, plan
from serve_app.openai.request.prompts import chat_prompt
from serve_app.openai.request.schema import ChatFields
from serve_app.openai.request.settings import ApiSettings
from serve_app.openai.response import logprobs
from serve_app.openai.response.delta import Delta
from serve_app.openai.response.response_builder import Job, ResponseEnvelope
from serve_app.openai.response.writing import writing
from serve_app.text.tokenizer import Tokenizer


async def job(model: ServedModel, settings: ApiSettings, fields: ChatFields, origin: Origin, created: int) -> Job:
    """Returns the checked job of a chat request, with its prompt as token ids.

    `origin` is the request's id and time limit; `created` is the time in the answer, in seconds since 1970. Raises `ApiError`
    (400) for fields that are not valid for this model, or a prompt that is too long.
    """
    if fields.top_logprobs and not fields.logprobs:
        raise invalid("top_logprobs", "only goes with logprobs: true")
    newer = fields.max_completion_tokens is not None
    asked = Asked(
        max_tokens=fields.max_completion_tokens if newer else fields.max_tokens,
        default_max=None,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        prompt_logprobs=fields.prompt_logprobs,
        prompt_field="messages",
        max_field="max_completion_tokens" if newer else "max_tokens",
        least_max=1,
    )
    choices = plan(model, settings, fields, asked, [await chat_prompt(model, fields)], origin)
    envelope = ResponseEnvelope(f"chatcmpl-{origin.request_id}", model.name, created)
    options = fields.stream_options
    return Job(
        endpoint="chat",
        choices=choices,
        writing=writing(model, fields),
        response_builder=ChatResponseBuilder(envelope, model.tokenizer, fields, choices),
        stream=fields.stream,
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.continuous_usage_stats,
    )


@dataclass(frozen=True)
class ChatResponseBuilder:
    """The JSON of chats. With ``return_token_ids``, the choices carry token ids, and the answer carries those of the prompt."""

    envelope: ResponseEnvelope
    tokenizer: Tokenizer | None
    fields: ChatFields
    choices: Sequence[ChoiceRequest]

    @property
    def shows_tokens(self) -> bool:
        """See `ResponseBuilder.shows_tokens`. True if logprobs or token ids were requested."""
        return self.fields.logprobs or self.fields.return_token_ids

    def opening(self, choice: ChoiceRequest) -> list[dict[str, Any]]:
        """See `ResponseBuilder.opening`. Returns one chunk, with the role of the assistant."""
        delta = {"role": "assistant", "content": ""}
        return [self._chunk({"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None})]

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """See `ResponseBuilder.chunk`. The last chunk of a choice has the prompt's token ids, if token ids were requested."""
        return self._chunk(self._choice(delta, "delta", {"content": delta.text} if delta.text or not delta.finish else {}))

    def last(self) -> dict[str, Any]:
        """See `ResponseBuilder.last`."""
        return self.envelope.object("chat.completion.chunk", [])

    def whole(self, choices: Sequence[Delta]) -> dict[str, Any]:
        """See `ResponseBuilder.whole`."""
        made = [
            self._choice(choice, "message", {"role": "assistant", "content": choice.text, "refusal": None})
            for choice in choices
        ]
        body = self.envelope.object("chat.completion", made)
        if self.fields.return_token_ids:
            body["prompt_token_ids"] = self.choices[0].prompt.ids
        return body

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        body = self.envelope.object("chat.completion.chunk", [choice])
        if self.fields.return_token_ids and choice["finish_reason"]:
            body["prompt_token_ids"] = self.choices[0].prompt.ids
        return body

    def _choice(self, delta: Delta, name: str, message: dict[str, Any]) -> dict[str, Any]:
        top = self.fields.top_logprobs or 0
        body: dict[str, Any] = {
            "index": delta.index,
            name: message,
            "logprobs": logprobs.chat(self.tokenizer, delta.entries, top) if self.fields.logprobs else None,
            "finish_reason": delta.finish,
            "stop_reason": delta.stop_reason,
        }
        if self.fields.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            body["prompt_logprobs"] = logprobs.prompt(self.tokenizer, delta.prompt_logprobs, self.fields.prompt_logprobs)
        if self.fields.return_token_ids:
            body["token_ids"] = [entry.token for entry in delta.entries]
        return body
