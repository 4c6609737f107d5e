"""Routes for the model: the list of models, tokenizing and detokenizing."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve_app.deployment.served_model import ServedModel
from serve_app.openai.request.body import read_object
from serve_app.openai.request.errors import unknown_model
from serve_app.openai.request.prompts import chat_prompt, check_ids, text_prompt, tokenizer_of
from serve_app.openai.request.schema import DetokenizeFields, TokenizeChatFields, TokenizeFields
from serve_app.openai.request.settings import ApiSettings
from serve_app.openai.response.encoding import json_response
from serve_app.openai.routes_generate import check_model


def add_models(router: APIRouter, model: ServedModel) -> None:
    """Add the routes ``/v1/models`` and ``/v1/models/{id}`` to `router`, with an entry for each name of `model`."""

    @router.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [_card(model, name) for name in model.names]})

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name not in model.names:
            raise unknown_model(name, model.names)
        return json_response(_card(model, name))


def add_tokens(router: APIRouter, model: ServedModel, settings: ApiSettings) -> None:
    """Add the routes ``/tokenize`` (a text or chat messages to token ids) and ``/detokenize`` to `router`."""

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read_object(request, settings.max_body_bytes)
        if "messages" in body:
            chat = TokenizeChatFields.parse(body)
            check_model(model, chat.model)
            return _tokens(model, (await chat_prompt(model, chat)).ids, chat.return_token_strs)
        fields = TokenizeFields.parse(body)
        check_model(model, fields.model)
        prompt = await text_prompt(model, fields.prompt, fields.add_special_tokens)
        return _tokens(model, prompt.ids, fields.return_token_strs)

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        fields = DetokenizeFields.parse(await read_object(request, settings.max_body_bytes))
        check_model(model, fields.model)
        ids = check_ids(model, fields.tokens, "tokens")
        return json_response({"prompt": tokenizer_of(model, "tokens").decode(ids, skip_special_tokens=False)})


def _tokens(model: ServedModel, ids: list[int], with_texts: bool) -> Response:
    tokenizer = tokenizer_of(model, "prompt")
    texts = [tokenizer.token_label(index) for index in ids] if with_texts else None
    return json_response({"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids, "token_strs": texts})


def _card(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "shardwright",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
    }
