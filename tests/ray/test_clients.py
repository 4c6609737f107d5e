"""The real server with a real model as its clients see it: openai, curl, the chat command, odd requests, many at once."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.ray.server import Server, free_port, run, serving
from tests.ray.streaming import Stream

KEY = "a-key"
CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--layout", "tp=2", "--api-key", KEY, "--max-model-len", "512") as running:
        running.client.headers["authorization"] = f"Bearer {KEY}"
        yield running


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60)


def test_the_official_client(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id == "smollm2-135m"
    asked: dict[str, Any] = {"model": model.id, "messages": HELLO, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert "Paris" in (whole.choices[0].message.content or "")
    parts = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens
    done = client.completions.create(model=model.id, prompt="The capital of France is", max_tokens=4, temperature=0, logprobs=1)
    assert "Paris" in done.choices[0].text


def test_the_official_clients_errors(server: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="smollm2-135m", messages=HELLO, temperature=9)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512"):
        client.completions.create(model="smollm2-135m", prompt="word " * 600)
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


@pytest.mark.long
def test_seeded_streams_equal_plain_answers_however_busy_it_is(server: Server) -> None:
    bodies = [{"messages": HELLO, "max_tokens": 12, "temperature": 1.0, "seed": seed} for seed in range(8)]
    alone = [server.post(CHAT, body)["choices"][0]["message"]["content"] for body in bodies]
    assert len(set(alone)) > 1
    with ThreadPoolExecutor(16) as pool:
        plain = pool.map(lambda body: server.post(CHAT, body)["choices"][0]["message"]["content"], bodies)
        headed = [_Keyed(server, body) for body in bodies]
        assert list(plain) == alone
        assert [each.finish().text for each in headed] == alone


ODD = {
    "no body": b"",
    "half JSON": b'{"messages": [',
    "a list": b"[]",
    "no messages": b"{}",
    "empty messages": b'{"messages": []}',
    "bad role": b'{"messages": [{"role": "wizard", "content": "x"}]}',
    "NaN": b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    "negative max_tokens": b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}',
    "too many choices": b'{"messages": [{"role": "user", "content": "x"}], "n": 100000}',
    "invalid UTF-8": b'{"messages": [{"role": "user", "content": "\xff"}]}',
    "token out of range": b'{"prompt": [999999999]}',
    "negative token": b'{"prompt": [-1]}',
    "bias out of range": b'{"prompt": "x", "logit_bias": {"99999999": 1}}',
    "a prompt that is too long": b'{"prompt": "' + b"word " * 2000 + b'"}',
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_request_is_refused_and_the_next_one_served(server: Server, name: str) -> None:
    path = "/v1/completions" if b"prompt" in ODD[name] else CHAT
    response = server.client.post(path, content=ODD[name], headers={"content-type": "application/json"})
    assert 400 <= response.status_code < 500, response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})["usage"]["completion_tokens"] == 1


LEGAL_BUT_ODD: dict[str, dict[str, Any]] = {
    "unknown field": {"prompt": "x", "temprature": 1, "max_tokens": 2},
    "more tokens than fit": {"prompt": [5] * 508, "max_tokens": 100_000_000_000},
    "empty prompt": {"prompt": "", "max_tokens": 2},
    "nothing to generate": {"prompt": "x", "max_tokens": 0, "echo": True, "logprobs": 0},
    "many choices": {"prompt": ["x", "y"], "n": 3, "max_tokens": 2},
    "tiny temperature": {"prompt": "x", "temperature": 1e-30, "max_tokens": 2},
    "every filter": {"prompt": "x", "top_p": 0.001, "top_k": 1, "min_p": 1, "max_tokens": 2},
    "penalties": {"prompt": "x x x", "presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 2, "max_tokens": 3},
    "prompt logprobs": {"prompt": "one two three", "prompt_logprobs": 2, "max_tokens": 1},
    "full length": {"prompt": [5] * 511, "max_tokens": 1},
}


@pytest.mark.parametrize("name", LEGAL_BUT_ODD)
def test_an_odd_but_legal_request_is_answered_and_the_next_one_too(server: Server, name: str) -> None:
    response = server.client.post("/v1/completions", json=LEGAL_BUT_ODD[name])
    assert response.status_code == 200 or (name == "empty prompt" and response.status_code == 400), response.text
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})["usage"]["completion_tokens"] == 1


def test_garbage_on_the_socket_does_no_harm(server: Server) -> None:
    for data in (b"\x00\xff" * 100, b"GET\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(data)
    assert server.health() == 200


def test_the_printed_curl_works(server: Server) -> None:
    printed = server.log.read_text()
    command = shlex.split(printed[printed.index("  curl") :].replace("\\\n", " "))
    command += ["-s", "-i", "-H", f"authorization: Bearer {KEY}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as curl:
        assert curl.stdout is not None
        lines = [curl.stdout.readline().strip() for _ in range(40)]
        curl.terminate()  # it may be a long answer
    assert lines[0] == "HTTP/1.1 200 OK"
    assert any('"content":' in line for line in lines), lines


def test_the_chat_command_streams_an_answer(server: Server) -> None:
    done = chat(
        ["--url", server.url, "--api-key", KEY, "--max-tokens", "24", "--temperature", "0"], "What is the capital of France?\n"
    )
    assert done.returncode == 0, done
    assert "Paris" in done.stdout
    refused = chat(["--url", server.url], "hello\n")
    assert "key" in (refused.stdout + refused.stderr).lower()
    assert "Traceback" not in refused.stderr


def test_the_chat_command_without_a_server() -> None:
    done = chat(["--url", f"http://127.0.0.1:{free_port()}"], "hello\n")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert len(re.findall("error:", done.stdout + done.stderr)) == 1


def chat(args: list[str], typed: str) -> subprocess.CompletedProcess[str]:
    return run("chat", *args, typed=typed)


class _Keyed(Stream):
    def __init__(self, server: Server, request: dict[str, Any]) -> None:
        super().__init__(server.url, request, CHAT, {"authorization": f"Bearer {KEY}"})
