"""The fields of request bodies. Types are strict: ``"5"`` and ``1.5`` are not token counts, ``true`` is not a number.

Unknown fields are ignored with one line in the log. Known but unsupported fields that would change the answer are refused
(`REFUSED`).
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serve_app.openai.request.errors import from_validation, unsupported

_log = logging.getLogger("shardwright.api")

Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
NonNegative = Annotated[int, Field(ge=0)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]

MAX_STOPS = 16

REFUSED = {
    "tools": "tool calls are not built yet",
    "functions": "tool calls are not built yet",
    "chat_template": "the model's own is used",
    "documents": "write them into a message",
    "suffix": "only text after the prompt is generated",
    "prediction": "leave it out",
    "audio": "only text is generated",
    "web_search_options": "leave it out",
    "use_beam_search": "sampling only",
    "logits_processors": "leave it out",
    "structured_outputs": "constrained output is not built yet",
    "guided_json": "constrained output is not built yet",
    "guided_regex": "constrained output is not built yet",
    "guided_choice": "constrained output is not built yet",
    "guided_grammar": "constrained output is not built yet",
    "prompt_embeds": "give text or token ids",
    "truncate_prompt_tokens": "shorten the prompt",
    "bad_words": "use logit_bias",
    "allowed_token_ids": "use logit_bias",
    "length_penalty": "sampling only",
}
"""Fields that other servers support, and the alternative here. Empty or false values are accepted."""


class RequestFields(BaseModel):
    """A request body. It is created by `parse` only."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        """Returns the validated fields of `body`, the JSON object of a request. Unknown fields are logged and ignored.

        Raises `ApiError` (400) for a missing field, a value of a wrong type or out of range, and a known field that is not
        supported.
        """
        _refuse(body)
        unknown = sorted(set(body) - set(cls.model_fields) - set(REFUSED) - {"response_format", "tool_choice", "modalities"})
        if unknown:
            _log.info("request fields ignored: %s", ", ".join(repr(name[:40]) for name in unknown[:20]))
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise from_validation(error) from None


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Whether every chunk carries the usage so far."""


class GenerationFields(RequestFields):
    """The fields that completions and chats have in common: sampling, stopping, and the contents of the answer."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    best_of: Annotated[int, Field(ge=1)] | None = None
    max_tokens: int | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    """Number of most likely tokens to sample from; 0 and -1 disable the limit."""
    min_p: Probability = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    seed: Int64 | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=1000)] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: NonNegative = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    prompt_logprobs: NonNegative | None = None
    return_token_ids: bool = False
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    user: Annotated[str, Field(max_length=512)] = ""
    cache_salt: Annotated[str, Field(max_length=512)] = ""

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings of the request as a tuple, which is empty if there are none."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionFields(GenerationFields):
    prompt: str | list[Any]
    """The prompt in one of four forms; `serve_app.openai.request.prompts` tells them apart."""
    echo: bool = False
    logprobs: NonNegative | None = None
    add_special_tokens: bool = True


class ChatTemplateFields(RequestFields):
    """The fields from which a chat template makes a prompt."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_special_tokens: bool = False
    """False by default, since the template writes the start token itself."""


class ChatFields(GenerationFields, ChatTemplateFields):
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: NonNegative | None = None


class TokenizeFields(RequestFields):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatFields(ChatTemplateFields):
    model: str | None = None
    return_token_strs: bool = False


class DetokenizeFields(RequestFields):
    model: str | None = None
    tokens: list[int]


def _refuse(body: dict[str, Any]) -> None:
    for name, instead in REFUSED.items():
        if body.get(name):
            raise unsupported(name, instead)
    form = body.get("response_format")
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        raise unsupported("response_format", "only {'type': 'text'} is")
    if body.get("tool_choice") not in (None, "none", "auto"):
        raise unsupported("tool_choice", "tool calls are not built yet")
    if body.get("modalities") not in (None, ["text"]):
        raise unsupported("modalities", "only ['text'] is")
