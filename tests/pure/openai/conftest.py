"""A toy model (bytes are tokens), a backend that follows a script, and clients for the endpoint made of both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from actors.wire.requests import GenerateRequest, TokenEvent, TokenLogprob
from serve_app.deployment.served_model import ServedModel
from serve_app.openai.api import ApiSettings, create_api
from serve_app.routing.backend import BackendRefused, Health
from serve_app.text import byte_level
from serve_app.text.template import ChatTemplate
from serve_app.text.tokenizer import Tokenizer

BOS, EOS = 256, 257
PIECES = [b"AB", b"CD", b"EF", b"\xf0\x9f", b"\x98\x80", b"\x9f\x98\x80", b"\xf0\x9f\x98\x80", b" the"]
"""Tokens of several bytes: ids from 258 on."""
TEMPLATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def toy_tokenizer() -> Tokenizer:
    vocabulary = {byte_level.from_bytes(bytes([byte])): byte for byte in range(256)}
    vocabulary |= {"<s>": BOS, "</s>": EOS}
    vocabulary |= {byte_level.from_bytes(piece): 258 + index for index, piece in enumerate(PIECES)}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")])
    return Tokenizer(inner)


def token_of(piece: bytes) -> int:
    return piece[0] if len(piece) == 1 else 258 + PIECES.index(piece)


Step = TokenEvent | Exception | asyncio.Event | Sequence[int] | int
Script = Callable[[GenerateRequest], Iterable[Step]]


@dataclass
class ScriptedBackend:
    """Follows `script`: a step is the tokens of one event (or one token), a whole event, an exception to raise, or an
    asyncio event to wait for. Stops at stop tokens and `max_tokens` like an engine; a script that runs out says EOS.
    """

    script: Script
    requests: list[GenerateRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    seen_health: Health = field(default_factory=lambda: Health(True, replicas=1))
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        self.requests.append(request)
        self.changed.set()
        done = False
        try:
            async with aclosing(self._events(request)) as events:
                async for event in events:
                    done = event.finish is not None
                    yield event
            done = True
            self.finished.append(request.request_id)
        except Exception:
            done = True
            raise
        finally:
            if not done:
                self.cancelled.append(request.request_id)
            self.changed.set()

    async def _events(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        made, first = 0, True
        if request.max_tokens == 0:
            yield self._event(request, [], True).model_copy(update={"finish": "length"})
            return
        for step in [*self.script(request), *([EOS] * request.max_tokens)]:
            await asyncio.sleep(0)
            if isinstance(step, Exception):
                raise step
            if isinstance(step, asyncio.Event):
                await step.wait()
                continue
            if isinstance(step, TokenEvent):
                yield step.model_copy(update={"request_id": request.request_id})
                if step.finish:
                    return
                continue
            tokens = [step] if isinstance(step, int) else list(step)
            tokens = tokens[: request.max_tokens - made]
            stops = [at for at, token in enumerate(tokens) if token in request.sampling.stop_token_ids]
            tokens = tokens[: stops[0] + 1] if stops else tokens
            made += len(tokens)
            event, first = self._event(request, tokens, first), False
            if stops:
                event = event.model_copy(update={"finish": "stop", "stop_token": tokens[-1]})
            elif made == request.max_tokens:
                event = event.model_copy(update={"finish": "length"})
            yield event
            if event.finish:
                return

    def _event(self, request: GenerateRequest, tokens: list[int], first: bool) -> TokenEvent:
        sampling, prompt = request.sampling, None
        if first and sampling.prompt_logprobs is not None:
            prompt = [None, *(logprob_of(token, sampling.prompt_logprobs) for token in request.prompt[1:])]
        logprobs = [logprob_of(token, sampling.logprobs) for token in tokens] if sampling.logprobs is not None else []
        return TokenEvent(
            request_id=request.request_id,
            tokens=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt,
            cached_tokens=min(2, len(request.prompt)) if first else 0,
        )

    async def health(self) -> Health:
        return self.seen_health

    async def stats(self) -> Mapping[str, Mapping[str, float]]:
        return {"r0": {"waiting": 3.0}}

    def gauges(self) -> Mapping[str, float]:
        return {"whole": 1.0}


def logprob_of(token: int, count: int) -> TokenLogprob:
    """The chosen token is second best, the rest is masked out."""
    top = [((token + 1) % 256, -0.25), (token, -1.5), *((index, float("-inf")) for index in range(300, 300 + 20))]
    return TokenLogprob(token=token, logprob=-1.5, top=top[:count])


@dataclass
class Answer:
    """A streamed answer: its raw data lines, and its choices put together as a client would."""

    status: int
    headers: httpx.Headers
    data: list[str]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [strict(line) for line in self.data if line != "[DONE]"]

    def joined(self) -> dict[int, dict[str, Any]]:
        choices: dict[int, dict[str, Any]] = {}
        for chunk in self.chunks:
            for part in chunk.get("choices", []):
                whole = choices.setdefault(
                    part["index"], {"text": "", "finish_reason": None, "logprobs": None, "token_ids": []}
                )
                whole["text"] += part["text"] if "text" in part else part["delta"].get("content", "")
                whole["finish_reason"] = part["finish_reason"] or whole["finish_reason"]
                whole["stop_reason"] = part.get("stop_reason")
                whole["token_ids"] += part.get("token_ids", [])
                whole["logprobs"] = glue(whole["logprobs"], part["logprobs"])
        return choices


def glue(one: dict[str, Any] | None, two: dict[str, Any] | None) -> dict[str, Any] | None:
    if one is None or two is None:
        return one or two
    return {key: one[key] + two[key] if isinstance(one[key], list) else one[key] for key in one}


def strict(text: str | bytes) -> Any:
    """JSON without NaN or infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@dataclass
class Endpoint:
    """The application over a script, without a network."""

    backend: ScriptedBackend
    model: ServedModel
    app: Any
    client: httpx.AsyncClient

    async def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        if "content" in options:
            options["headers"] = {"content-type": "application/json", **options.get("headers", {})}
        else:
            options = {"json": body, **options}
        return await self.client.post(path, **options)

    async def stream(self, path: str, body: dict[str, Any]) -> Answer:
        response = await self.post(path, body | {"stream": True})
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        return Answer(response.status_code, response.headers, lines)

    async def both(self, path: str, body: dict[str, Any]) -> tuple[list[dict[str, Any]], Answer]:
        """The choices of the whole answer and the stream, which must say the same; the choices are given back."""
        whole = await self.post(path, body)
        assert whole.status_code == 200, whole.text
        answer = await self.stream(path, body | {"stream_options": {"include_usage": True}})
        assert answer.data[-1] == "[DONE]"
        choices, joined = strict(whole.content)["choices"], answer.joined()
        for choice in choices:
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            streamed = joined[choice["index"]]
            assert streamed["text"] == text
            assert streamed["finish_reason"] == choice["finish_reason"]
            assert streamed["logprobs"] == choice["logprobs"]
            assert streamed["token_ids"] == choice.get("token_ids", [])
            assert streamed["stop_reason"] == choice["stop_reason"]
            choice["text"] = text
        assert answer.chunks[-1]["usage"] == strict(whole.content)["usage"]
        assert len(joined) == len(choices)
        return choices, answer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return toy_tokenizer()


@pytest.fixture(scope="session")
def toy_model(tokenizer: Tokenizer) -> ServedModel:
    return ServedModel(
        names=("toy", "alias"),
        vocab_size=400,
        max_model_len=64,
        eos_token_ids=(EOS,),
        bos_token_id=None,
        tokenizer=tokenizer,
        template=ChatTemplate(TEMPLATE),
        created=1,
    )


@pytest.fixture
def endpoint(toy_model: ServedModel) -> Callable[..., Endpoint]:
    """Make an endpoint from a script (or from the pieces of one answer) and changes to the model."""

    def make(
        script: Script | Sequence[Step | bytes],
        settings: ApiSettings | None = None,
        model: ServedModel = toy_model,
        **changes: Any,
    ) -> Endpoint:
        if not callable(script):
            steps = [token_of(step) if isinstance(step, bytes) else step for step in script]
            backend = ScriptedBackend(lambda _: steps)
        else:
            backend = ScriptedBackend(script)
        model = replace(model, **changes)
        app = create_api(model, backend, settings or ApiSettings())
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://toy")
        return Endpoint(backend, model, app, client)

    return make


@pytest.fixture
def refused() -> Callable[..., BackendRefused]:
    return BackendRefused
