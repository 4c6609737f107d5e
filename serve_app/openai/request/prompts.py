"""The prompt of a request as token ids, for every form in which it may be given.

    prompt              text | [text, …] | [id, …] | [[id, …], …]      one or several prompts
    messages            through the chat template                      one prompt

An empty text becomes the model's start token; a model without one refuses it. An empty list of ids is always refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.deployment.served_model import ServedModel
from serve_app.openai.request.errors import ApiError, invalid
from serve_app.openai.request.messages import conversation
from serve_app.openai.request.schema import ChatTemplateFields, CompletionFields
from serve_app.text.template import TemplateError
from serve_app.text.tokenizer import Tokenizer

_LONG_TEXT = 10_000
"""Number of characters from which tokenising runs in a thread, so that the event loop can serve other requests."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids. `text` is what the caller wrote, if the prompt was a text."""

    ids: list[int]
    text: str | None = None


async def completion_prompts(model: ServedModel, fields: CompletionFields) -> list[Prompt]:
    """Returns the prompts of a completion request as token ids: one or several, given as texts or ids.

    Raises `ApiError` (400) for a list that is empty or mixed, ids beyond the vocabulary, a text if there is no tokenizer, and
    an empty text if there is no start token.
    """
    return [await _read(model, item, fields.add_special_tokens) for item in _several(fields.prompt)]


async def chat_prompt(model: ServedModel, fields: ChatTemplateFields) -> Prompt:
    """Returns the prompt that the model's chat template makes of the messages in `fields`.

    Raises `ApiError` (400) if the model has no template or tokenizer, the messages are not valid or the template refuses them,
    or the options contradict each other.
    """
    if model.template is None or model.tokenizer is None:
        raise invalid("messages", _no_template(model))
    if fields.add_generation_prompt and fields.continue_final_message:
        raise invalid("continue_final_message", "cannot go with add_generation_prompt; set that to false")
    messages = conversation(fields.messages, model.template)
    try:
        text = model.template.render(
            messages, fields.add_generation_prompt, fields.continue_final_message, fields.chat_template_kwargs
        )
    except TemplateError as error:
        raise invalid("messages", str(error)) from None
    return Prompt(await _encode(model, text, fields.add_special_tokens, "messages"))


async def text_prompt(model: ServedModel, text: str, add_special_tokens: bool) -> Prompt:
    """Returns the prompt of `text`, without tokens if the text is empty. `add_special_tokens`: whether to add the model's start
    token and the like.

    Raises `ApiError` (400) if the model has no tokenizer, or it cannot read the text.
    """
    tokenizer = tokenizer_of(model, "prompt")
    return Prompt(await _in_background_if_long(tokenizer, text, add_special_tokens), text)


def tokenizer_of(model: ServedModel, param: str) -> Tokenizer:
    """Returns the model's tokenizer. Raises `ApiError` (400), which names the request field `param`, if the model has none."""
    if model.tokenizer is None:
        raise invalid(param, "this model has no tokenizer, so texts cannot be read or written: give the prompt as token ids")
    return model.tokenizer


def check_ids(model: ServedModel, ids: Sequence[Any], param: str) -> list[int]:
    """Returns `ids`, values of the request field `param`, as a list of token ids. Raises `ApiError` (400), which names the
    field, unless all are integers within the model's vocabulary."""
    if not all(type(index) is int and 0 <= index < model.vocab_size for index in ids):
        raise invalid(param, f"token ids are integers from 0 to {model.vocab_size - 1}")
    return list(ids)


def _no_template(model: ServedModel) -> str:
    names = f" named default, only {', '.join(model.template_names)}" if model.template_names else ""
    return f"this model has no chat template{names}; use /v1/completions, or add chat_template.jinja to its folder"


def _several(prompt: str | list[Any]) -> list[Any]:
    """Returns the prompts, each a text or a list of ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt", "the list is empty")
    if all(type(item) is int for item in prompt):
        return [prompt]
    if all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt):
        return prompt
    raise invalid("prompt", "must be a text, a list of texts, a list of token ids, or a list of lists of token ids")


async def _read(model: ServedModel, item: str | list[Any], add_special_tokens: bool) -> Prompt:
    if isinstance(item, str):
        return Prompt(await _encode(model, item, add_special_tokens, "prompt"), item)
    if not item:
        raise invalid("prompt", "a list of token ids is empty")
    return Prompt(check_ids(model, item, "prompt"))


async def _encode(model: ServedModel, text: str, add_special_tokens: bool, param: str) -> list[int]:
    ids = await _in_background_if_long(tokenizer_of(model, param), text, add_special_tokens)
    if ids:
        return ids
    if model.bos_token_id is None:
        raise invalid(param, "is empty, and this model has no start token to begin from")
    return [model.bos_token_id]


async def _in_background_if_long(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    try:
        if len(text) < _LONG_TEXT:
            return tokenizer.encode(text, add_special_tokens)
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)
    except Exception as error:  # the library raises bare Exception
        raise ApiError(400, "The text cannot be turned into tokens.", param="prompt", code="invalid_value") from error
