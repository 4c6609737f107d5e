"""D05, D07, E08: one error shape, refusals before the stream starts, and streams that end properly when they fail."""

from __future__ import annotations

import json
import logging

import pytest

from actors.wire.requests import TokenEvent
from serve_app.routing.backend import BackendRefused, Health

SECRET = "zebra"
USER = [{"role": "user", "content": "x"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

BAD = [
    (CHAT, {"messages": SECRET}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": [SECRET]}, "messages"),
    (CHAT, {"messages": [{"role": SECRET, "content": "x"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": 7}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": SECRET}]}]}, "messages"),
    (CHAT, {"messages": USER * 2}, "messages"),
    (CHAT, {"messages": USER, "temperature": 9}, "temperature"),
    (CHAT, {"messages": USER, "temperature": SECRET}, "temperature"),
    (CHAT, {"messages": USER, "n": 0}, "n"),
    (CHAT, {"messages": USER, "n": 1000}, "n"),
    (CHAT, {"messages": USER, "top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "logprobs"),
    (CHAT, {"messages": USER, "tools": [{"type": "function", "function": {"name": SECRET}}]}, "tools"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"messages": USER, "continue_final_message": True}, "continue_final_message"),
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": 7}, "prompt"),
    (COMPLETIONS, {"prompt": [1, SECRET]}, "prompt"),
    (COMPLETIONS, {"prompt": [True]}, "prompt"),
    (COMPLETIONS, {"prompt": [400]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": ["x"] * 100, "n": 100}, "n"),
    (COMPLETIONS, {"prompt": "x", "best_of": 2}, "best_of"),
    (COMPLETIONS, {"prompt": "x", "suffix": SECRET}, "suffix"),
    (COMPLETIONS, {"prompt": "x", "stop": [SECRET] * 17}, "stop"),
    (COMPLETIONS, {"prompt": "x", "stop": ""}, "stop"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {SECRET: 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"400": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"4": 101}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [400]}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "x", "seed": 2**64}, "seed"),
    (COMPLETIONS, {"prompt": "x", "min_tokens": 20}, "min_tokens"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "x", "logprobs": True}, "logprobs"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD)
async def test_bad_fields_are_named_and_their_content_is_not_told(endpoint, path, body, param):
    api = endpoint([b"A"])
    for stream in ({}, {"stream": True}):
        answer = await api.post(path, body | stream)
        assert answer.status_code == 400, answer.text
        assert answer.headers["content-type"] == "application/json"
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert isinstance(error["code"], str)
        assert SECRET not in answer.text
    assert api.backend.requests == []


async def test_stream_options_want_a_stream(endpoint):
    answer = await endpoint([]).post(COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")


async def test_models_by_name(endpoint):
    api = endpoint([b"A"])
    for name in ("toy", "alias", None):
        answer = await api.post(COMPLETIONS, {"prompt": "x", "model": name})
        assert (answer.status_code, answer.json()["model"]) == (200, "toy")
    for path, body in ((COMPLETIONS, {"prompt": "x", "model": SECRET}), (CHAT, {"messages": USER, "model": SECRET})):
        answer = await api.post(path, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert SECRET not in answer.text
    assert [card["id"] for card in (await api.client.get("/v1/models")).json()["data"]] == ["toy", "alias"]
    assert (await api.client.get("/v1/models/toy")).json()["max_model_len"] == 64
    assert (await api.client.get("/v1/models/zebra")).status_code == 404


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b'"x"', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"prompt": "x", "top_p": NaN}',
        b"[" * 100_000, b'{"prompt": "' + b"x" * 2000 + b'"}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
async def test_bodies_that_are_no_json_object(endpoint, content, path):
    from serve_app.openai.api import ApiSettings

    api = endpoint([b"A"], ApiSettings(max_body_bytes=1000 if content[:1] != b"[" else 10**6))
    answer = await api.post(path, content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_body"


async def test_unknown_paths_and_methods(endpoint):
    api = endpoint([])
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", COMPLETIONS, 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/", 404),
    ):
        answer = await api.client.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_unknown_fields_are_ignored_with_one_log_line(endpoint, caplog):
    api = endpoint([b"A"])
    with caplog.at_level(logging.INFO, "shardwright.api"):
        answer = await api.post(COMPLETIONS, {"prompt": "x", "wonder": SECRET, "store": True, "stop": None, "tools": []})
    assert answer.status_code == 200
    assert [record.getMessage() for record in caplog.records] == ["request fields ignored: 'store', 'wonder'"]


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (BackendRefused("engine_busy", "full", retry_after_s=2.2), 429, "engine_busy"),
        (BackendRefused("engine_busy", "full"), 429, "engine_busy"),
        (BackendRefused("engine_down", "rebuilding"), 503, "engine_down"),
        (BackendRefused("prompt_too_long", "too long"), 400, "context_length_exceeded"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_come_before_the_stream(endpoint, refusal, status, code, stream):
    def script(request):
        return [b"A"[0]] if request.request_id.endswith("-0") else [refusal]

    api = endpoint(script)
    answer = await api.post(COMPLETIONS, {"prompt": "x", "n": 2, "stream": stream})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers.get("retry-after") == (None if status == 400 else "3" if refusal.retry_after_s else "1")


FAILURES = [
    (RuntimeError(SECRET), "internal_error", 500),
    (BackendRefused("engine_down", "a rank died"), "engine_down", 503),
    (TokenEvent(request_id="", finish="error", error="a rank died"), "engine_error", 500),
    (TokenEvent(request_id="", finish="abort"), "engine_abort", 503),
    (TokenEvent(request_id="", finish="deadline"), "deadline_exceeded", 504),
]


@pytest.mark.parametrize(("failure", "code", "status"), FAILURES)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_failure_after_five_tokens(endpoint, failure, code, status, path):
    api = endpoint([*b"hello", failure])
    body = {"prompt": "x"} if path == COMPLETIONS else {"messages": USER}
    answer = await api.stream(path, body)
    assert answer.status == 200
    assert answer.data[-1] == "[DONE]"
    assert answer.data.count("[DONE]") == 1
    errors = [chunk["error"] for chunk in answer.chunks if "error" in chunk]
    assert [error["code"] for error in errors] == [code]
    assert "error" in answer.chunks[-1]
    assert answer.joined()[0]["text"] == "hello"
    assert SECRET not in str(answer.data)
    whole = await api.post(path, body)
    assert (whole.status_code, whole.json()["error"]["code"]) == (status, code)
    metrics = (await api.client.get("/metrics")).text
    name = "completions" if path == COMPLETIONS else "chat"
    assert f'shardwright_requests_total{{endpoint="{name}",status="{status}"}} 2.0' in metrics
    assert 'status="499"' not in metrics
    assert api.backend.cancelled == []


async def test_one_failing_choice_cancels_the_others(endpoint):
    def script(request):
        return [*b"ab", RuntimeError("x")] if request.request_id.endswith("-1") else list(b"c" * 50)

    api = endpoint(script)
    answer = await api.stream(COMPLETIONS, {"prompt": "x", "n": 3, "max_tokens": 50})
    assert [list(chunk) for chunk in answer.chunks if "error" in chunk] == [["error"]]
    assert len(api.backend.cancelled) == 2


async def test_an_engine_that_falls_silent_is_an_error(endpoint):
    api = endpoint([])

    async def generate(request):
        yield TokenEvent(request_id=request.request_id, tokens=[65])

    api.backend.generate = generate
    answer = await api.post(COMPLETIONS, {"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")


async def test_keys(endpoint):
    from serve_app.openai.api import ApiSettings

    api = endpoint([b"A"], ApiSettings(api_keys=("one", "two")))
    for key, status in (
        (None, 401),
        ("Bearer three", 401),
        ("Basic one", 401),
        ("Bearer ", 401),
        ("Bearer two", 200),
        ("bearer one", 200),
    ):
        headers = {} if key is None else {"authorization": key}
        for method, path, body in (
            ("POST", COMPLETIONS, {"prompt": "x"}),
            ("GET", "/v1/models", None),
            ("POST", "/tokenize", {"prompt": "x"}),
        ):
            answer = await api.client.request(method, path, json=body, headers=headers)
            assert answer.status_code == status
            assert status == 200 or answer.json()["error"]["code"] == "invalid_api_key"
    for path in ("/health", "/metrics", "/version"):
        assert (await api.client.get(path)).status_code == 200


async def test_health_tells_the_backends_state(endpoint):
    api = endpoint([])
    assert (await api.client.get("/health")).json() == {"status": "ok", "reason": "", "replicas": 1}
    api.backend.seen_health = Health(False, "rank 1 died")
    answer = await api.client.get("/health")
    assert (answer.status_code, answer.json()["reason"]) == (503, "rank 1 died")

    async def broken():
        raise RuntimeError

    api.backend.health = api.backend.stats = broken
    assert (await api.client.get("/health")).status_code == 503
    assert (await api.client.get("/metrics")).status_code == 200


async def test_request_ids(endpoint):
    api = endpoint([])
    assert (await api.client.get("/health", headers={"x-request-id": "mine-1"})).headers["x-request-id"] == "mine-1"
    drawn = (await api.client.get("/health", headers={"x-request-id": "bad id"})).headers["x-request-id"]
    assert len(drawn) == 32
    for seconds in ("0", "-1", "nan", "inf", "soon"):
        answer = await api.post(COMPLETIONS, {"prompt": "x"}, headers={"x-request-timeout-seconds": seconds})
        assert answer.status_code == 400


async def test_metrics_add_up(endpoint):
    api = endpoint([[65], [66, 67]])  # and the end token: 4 tokens, 3 of them after the first
    await api.both(COMPLETIONS, {"prompt": "xyz", "n": 2})
    text = (await api.client.get("/metrics")).text
    for line in (
        'shardwright_requests_total{endpoint="completions",status="200"} 2.0',
        'shardwright_choices_total{endpoint="completions",finish_reason="stop"} 4.0',
        'shardwright_requests_running{endpoint="completions"} 0.0',
        "shardwright_prompt_tokens_total 6.0",
        "shardwright_cached_prompt_tokens_total 4.0",
        "shardwright_generated_tokens_total 16.0",
        'shardwright_time_to_first_token_seconds_count{endpoint="completions"} 4.0',
        'shardwright_time_per_output_token_seconds_count{endpoint="completions"} 12.0',
        'shardwright_request_seconds_count{endpoint="completions"} 2.0',
        'shardwright_engine_waiting{replica="r0"} 3.0',
    ):
        assert line in text


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_metric_of_cached_tokens_is_the_sum_of_what_usage_told(endpoint, stream, late):
    """Whatever the choices find: each in turn, all in one event, or after an event that did not know yet."""

    def script(request):
        cached = [0, 9, 4, 3, 5, 0][int(request.request_id.rsplit("-", 1)[1])]
        event = TokenEvent(request_id="", tokens=[65], cached_tokens=cached)
        return [*([TokenEvent(request_id="")] if late else []), event, event, event.model_copy(update={"finish": "length"})]

    api, told = endpoint(script), 0
    for prompts, n in ((["x"], 1), (["x"], 3), (["x", "y"], 3), (["x", "y", "z"], 2)):
        body = {"prompt": prompts, "n": n, "max_tokens": 3}
        if stream:
            usage = (await api.stream(COMPLETIONS, body | {"stream_options": {"include_usage": True}})).chunks[-1]["usage"]
        else:
            usage = (await api.post(COMPLETIONS, body)).json()["usage"]
        told += usage["prompt_tokens_details"]["cached_tokens"]
    assert told == (0) + (0) + (0 + 3) + (0 + 4 + 5)  # by request, what the first choice of each prompt found
    assert f"shardwright_cached_prompt_tokens_total {told}.0" in (await api.client.get("/metrics")).text


async def test_one_process_may_hold_several_applications(endpoint):
    one, two = endpoint([b"A"]), endpoint([b"A"])
    await one.post(COMPLETIONS, {"prompt": "x"})
    assert "shardwright_prompt_tokens_total 1.0" in (await one.client.get("/metrics")).text
    assert "shardwright_prompt_tokens_total 0.0" in (await two.client.get("/metrics")).text
    assert json.loads((await two.client.get("/version")).text)["version"]
