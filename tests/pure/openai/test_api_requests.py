"""D04, D08, D10: every odd but legal request gets the answer its rule states, as strict JSON."""

from __future__ import annotations

import itertools
import json

import pytest


def strict(data: bytes):
    """JSON without NaN or infinity."""
    return json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


PROMPTS = {
    "''": ("", 400),
    "['']": ([""], 400),
    "[]": ([], 400),
    "[[]]": ([[]], 400),
    "one": ([65], 200),
    "three": (["a", "b", "c"], 200),
}


@pytest.mark.parametrize("bos", [None, 256])
@pytest.mark.parametrize("name", PROMPTS)
async def test_odd_prompts_with_echo_and_logprobs(endpoint, name, bos):
    api = endpoint([b"AB", b"CD"], bos_token_id=bos)
    prompt, status = PROMPTS[name]
    status = 200 if bos is not None and name in ("''", "['']") else status
    for max_tokens, echo, logprobs in itertools.product((0, 1, None), (False, True), (None, 0, 1, 5)):
        body = {"prompt": prompt, "max_tokens": max_tokens, "echo": echo, "logprobs": logprobs}
        answer = await api.post("/v1/completions", body)
        assert answer.status_code == status, (body, answer.text)
        if status == 400:
            assert strict(answer.content)["error"]["param"] == "prompt"
            continue
        choices, _ = await api.both("/v1/completions", body)
        assert len(choices) == (3 if name == "three" else 1)
        for choice in choices:
            _check_choice(choice, body, max_tokens)
        plain = await api.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
        assert strict(plain.content)["choices"][0]["text"] == "ABCD"


def _check_choice(choice, body, max_tokens):
    generated = {0: 0, 1: 1, None: 3}[max_tokens]
    assert choice["finish_reason"] == ("stop" if max_tokens is None else "length")
    echoed = 1 if body["echo"] else 0  # every prompt is one token, the start token (which has no text) or one letter
    letters = echoed if body["prompt"] not in ("", [""]) else 0
    assert len(choice["text"]) == letters + {0: 0, 1: 2, None: 4}[max_tokens]
    logprobs = choice["logprobs"]
    if body["logprobs"] is None:
        assert logprobs is None
        return
    assert {len(logprobs[key]) for key in logprobs} == {generated + echoed}
    for at, (value, top) in enumerate(zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)):
        if echoed and at == 0:
            assert value is None
            assert top is None
        else:
            assert value == -1.5
            assert len(top) == {0: 1, 1: 2, 5: 5}[body["logprobs"]]
            assert list(top.values()) == sorted(top.values(), reverse=True)


async def test_scoring_gives_the_prompts_logprobs(endpoint):
    api = endpoint([b"AB"])
    choices, _ = await api.both("/v1/completions", {"prompt": "xyz", "max_tokens": 0, "echo": True, "logprobs": 1})
    assert choices[0]["text"] == "xyz"
    assert choices[0]["logprobs"]["tokens"] == ["x", "y", "z"]
    assert choices[0]["logprobs"]["token_logprobs"] == [None, -1.5, -1.5]
    assert choices[0]["logprobs"]["text_offset"] == [0, 1, 2]


async def test_text_offsets_and_parts_of_characters(endpoint):
    api = endpoint([b"AB", b"\xf0\x9f", b"\x98\x80", b"CD"])
    choices, _ = await api.both("/v1/completions", {"prompt": "xé", "echo": True, "logprobs": 0, "max_tokens": 4})
    assert choices[0]["text"] == "xéAB😀CD"
    assert choices[0]["logprobs"]["text_offset"] == [0, 1, 1, 2, 4, 4, 5]
    assert choices[0]["logprobs"]["tokens"][4] == "bytes:\\xf0\\x9f"


async def test_chat_logprobs_have_bytes_and_exactly_the_count(endpoint):
    api = endpoint([b"\xf0\x9f", b"\x98\x80"])
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 5, "max_tokens": 2}
    choices, _ = await api.both("/v1/chat/completions", body)
    content = choices[0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "😀"
    for entry in content:
        values = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(values) == 5
        assert values == sorted(values, reverse=True)
        assert min(values) == -9999.0
        assert entry["logprob"] <= 0


async def test_more_alternatives_than_the_vocabulary_has(endpoint):
    api = endpoint([b"A"], vocab_size=100)
    await api.post("/v1/completions", {"prompt": [1, 2], "logprobs": 20, "max_tokens": 1})
    assert api.backend.requests[0].sampling.logprobs == 20
    api = endpoint([b"A"], vocab_size=7)
    await api.post("/v1/completions", {"prompt": [1, 2], "logprobs": 20, "max_tokens": 1, "echo": True})
    assert api.backend.requests[0].sampling.logprobs == api.backend.requests[0].sampling.prompt_logprobs == 7


async def test_masked_tokens_with_bias_and_echo_stay_strict_json(endpoint):
    bias = {str(index): -100 for index in range(3, 400)}
    api = endpoint([b"AB"])
    body = {"prompt": "xy", "logprobs": 5, "top_k": 1, "temperature": 0.01, "logit_bias": bias, "echo": True}
    answer = await api.post("/v1/completions", body)
    assert answer.status_code == 200
    strict(answer.content)
    assert api.backend.requests[0].sampling.logit_bias[399] == -100
    await api.both("/v1/completions", body)


LIMIT = 32
MAX_TOKENS = [(None, 200), (1, 200), (2, 200), (100, 200), (10**9, 200), (-1, 400), (1.5, 400), ("5", 400), (True, 400)]


@pytest.mark.parametrize("length", [30, 31, 32, 33])
@pytest.mark.parametrize("kind", ["text", "ids", "chat"])
async def test_prompt_and_max_tokens_against_the_limit(endpoint, length, kind):
    api = endpoint([b"A"] * 100, max_model_len=LIMIT)
    for max_tokens, status in MAX_TOKENS:
        body = {"prompt": "x" * length if kind == "text" else [120] * length, "max_tokens": max_tokens}
        path = "/v1/completions"
        if kind == "chat":
            path, body = (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "x" * (length - 6)}], "max_tokens": max_tokens},
            )
        for stream in (False, True):
            answer = await api.post(path, body | {"stream": stream})
            expected = 400 if length >= LIMIT else status
            assert answer.status_code == expected, (body, answer.text)
            if expected == 400:
                assert answer.headers["content-type"] == "application/json"
        if status == 400:
            assert strict(answer.content)["error"]["param"] == "max_tokens"
        elif length >= LIMIT:
            error = strict(answer.content)["error"]
            assert error["code"] == "context_length_exceeded"
            assert error["param"] == ("messages" if kind == "chat" else "prompt")
            assert str(LIMIT) in error["message"]
            assert f"{length} tokens" in error["message"]
            assert max_tokens is None or str(max_tokens) in error["message"]
        else:
            choices, stream = await api.both(path, body)
            room = LIMIT - length
            assert choices[0]["text"] == "A" * min(room, max_tokens or room)
            assert choices[0]["finish_reason"] == "length"
            assert stream.chunks[-1]["usage"]["prompt_tokens"] == length


async def test_defaults_of_max_tokens(endpoint):
    api = endpoint([b"A"] * 100)
    choices, _ = await api.both("/v1/completions", {"prompt": "x"})
    assert choices[0]["text"] == "A" * 16
    choices, _ = await api.both("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert choices[0]["text"] == "A" * (64 - 7)
    body = {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 3, "max_tokens": 9}
    assert (await api.both("/v1/chat/completions", body))[0][0]["text"] == "AAA"
    refused = await api.post("/v1/chat/completions", body | {"max_completion_tokens": 0})
    assert strict(refused.content)["error"]["param"] == "max_completion_tokens"


async def test_several_prompts_and_choices(endpoint):
    api = endpoint(lambda request: [request.prompt[0], *([request.sampling.seed % 10 + 48])])
    choices, answer = await api.both("/v1/completions", {"prompt": ["a", "b"], "n": 2, "seed": 7, "max_tokens": 2})
    assert [choice["text"] for choice in choices] == ["a7", "a8", "b7", "b8"]
    usage = answer.chunks[-1]["usage"]
    assert usage == {
        "prompt_tokens": 2, "completion_tokens": 8, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip
    assert len({request.request_id for request in api.backend.requests}) == 8


async def test_a_seed_is_drawn_where_none_is_given(endpoint):
    api = endpoint([b"A"])
    for _ in range(2):
        await api.post("/v1/completions", {"prompt": "x"})
    one, two = (request.sampling.seed for request in api.backend.requests)
    assert one != two
    assert 0 <= one < 2**63
    await api.post("/v1/completions", {"prompt": "x", "seed": -1, "n": 2})
    assert [request.sampling.seed for request in api.backend.requests[2:]] == [2**63 - 1, 0]


async def test_every_field_reaches_the_engine(endpoint):
    api = endpoint([b"A"])
    body = {
        "prompt": "x", "temperature": 0, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": -1, "frequency_penalty": 2, "min_tokens": 2, "stop_token_ids": [5], "priority": -3,
        "user": "me", "cache_salt": "s", "prompt_logprobs": 2, "max_tokens": 9,
    }  # fmt: skip
    answer = await api.post("/v1/completions", body, headers={"x-request-timeout-seconds": "2.5", "x-request-id": "abc"})
    assert answer.headers["x-request-id"] == "abc"
    request = api.backend.requests[0]
    sampling = request.sampling.model_dump()
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "min_tokens",
    ):
        assert sampling[name] == body[name], name
    assert sampling["stop_token_ids"] == (257, 5)
    assert (request.priority, request.tenant, request.cache_salt, request.timeout_s) == (-3, "me", "s", 2.5)
    assert request.request_id.startswith("abc-")
    assert strict(answer.content)["choices"][0]["prompt_logprobs"][0] is None
    assert strict(answer.content)["id"].startswith("cmpl-abc-")


async def test_token_ids_are_given_back(endpoint):
    api = endpoint([b"AB", b"CD"])
    choices, _ = await api.both("/v1/completions", {"prompt": "x", "return_token_ids": True})
    assert choices[0]["token_ids"] == [258, 259, 257]
    assert choices[0]["prompt_token_ids"] == [120]
    answer = await api.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "return_token_ids": True})
    assert bytes(strict(answer.content)["prompt_token_ids"]) == b"<u>x<a>"


async def test_a_model_without_tokenizer_speaks_ids(endpoint):
    api = endpoint([[1, 2], 3], tokenizer=None, template=None)
    choices, _ = await api.both("/v1/completions", {"prompt": [7, 8], "max_tokens": 3, "logprobs": 1, "echo": True})
    assert (choices[0]["text"], choices[0]["token_ids"]) == ("", [7, 8, 1, 2, 3])
    assert choices[0]["logprobs"]["tokens"][0] == "token_id:7"
    for path, body, param in (
        ("/v1/completions", {"prompt": "x"}, "prompt"),
        ("/v1/completions", {"prompt": [1], "stop": "x"}, "stop"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ("/tokenize", {"prompt": "x"}, "prompt"),
        ("/detokenize", {"tokens": [1]}, "tokens"),
    ):
        answer = await api.post(path, body)
        assert (answer.status_code, strict(answer.content)["error"]["param"]) == (400, param)


async def test_tokens_and_back(endpoint):
    api = endpoint([])
    answer = strict((await api.post("/tokenize", {"prompt": "hé<s>", "return_token_strs": True})).content)
    assert answer["tokens"] == [104, 195, 169, 256]
    assert (answer["count"], answer["max_model_len"], answer["token_strs"][1]) == (4, 64, "bytes:\\xc3")
    assert strict((await api.post("/detokenize", {"tokens": answer["tokens"]})).content) == {"prompt": "hé<s>"}
    chat = strict((await api.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})).content)
    assert bytes(chat["tokens"]) == b"<u>x<a>"
    assert strict((await api.post("/tokenize", {"prompt": ""})).content)["tokens"] == []


async def test_message_parts_and_continued_messages(endpoint):
    api = endpoint([b"A"])
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = {
        "messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "so "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    assert (await api.post("/v1/chat/completions", body)).status_code == 200
    assert bytes(api.backend.requests[0].prompt) == b"<u>one\ntwo<a>so "
