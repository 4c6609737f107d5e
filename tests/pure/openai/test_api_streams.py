"""D01, D02: text is whole characters, stop strings never leak, and streamed answers equal whole ones."""

from __future__ import annotations

import asyncio

import pytest

EMOJI = "😀"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    "pieces",
    [
        [b"\xf0", b"\x9f\x98\x80"],
        [b"\xf0\x9f", b"\x98\x80"],
        [b"\xf0", b"\x9f", b"\x98", b"\x80"],
        [b"\xf0\x9f\x98\x80"],
    ],
)
@pytest.mark.parametrize("chat", [False, True])
async def test_an_emoji_cut_anywhere_comes_whole(endpoint, pieces, chat):
    api = endpoint([*pieces, b" the"])
    path, body = ("/v1/chat/completions", CHAT) if chat else ("/v1/completions", {"prompt": "hi", "max_tokens": 40})
    choices, answer = await api.both(path, body | {"n": 2})
    assert [choice["text"] for choice in choices] == [EMOJI + " the"] * 2
    assert "\ufffd" not in "".join(answer.data)


@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦 family", "שלום עולם", "你好，世界", "naïve café"])
async def test_text_of_single_bytes(endpoint, text):
    api = endpoint(list(text.encode()))
    choices, answer = await api.both("/v1/completions", {"prompt": "p", "max_tokens": 60})
    assert choices[0]["text"] == text
    assert "\ufffd" not in "".join(answer.data)


async def test_two_streams_at_once_do_not_mix(endpoint):
    texts = {b"a"[0]: "😀 one", b"b"[0]: "שתיים 😀"}
    api = endpoint(lambda request: list(texts[request.prompt[0]].encode()))
    one, two = await asyncio.gather(
        *(api.stream("/v1/completions", {"prompt": prompt, "max_tokens": 40}) for prompt in ("a", "b"))
    )
    assert one.joined()[0]["text"] == "😀 one"
    assert two.joined()[0]["text"] == "שתיים 😀"


async def test_a_cut_inside_a_character_ends_in_one_mark(endpoint):
    api = endpoint([b"A", b"\xf0", b"\x9f", b"\x98"])
    choices, _ = await api.both("/v1/completions", {"prompt": "p", "max_tokens": 3})
    assert choices[0]["text"] == "A\ufffd"
    assert choices[0]["finish_reason"] == "length"


async def test_a_character_the_prompt_began_is_completed(endpoint):
    api = endpoint([b"\x9f", b"\x98", b"\x80"])
    choices, _ = await api.both("/v1/completions", {"prompt": [65, 0xF0]})
    assert choices[0]["text"] == EMOJI
    choices, _ = await api.both("/v1/completions", {"prompt": [65, 0xF0], "echo": True})
    assert choices[0]["text"] == "A" + EMOJI


@pytest.mark.parametrize(
    ("stop", "text", "reason", "used"),
    [
        ("BCDE", "A", "stop", 3),
        ("EFG", "ABCDEF", "stop", 4),
        (["CD", "BC"], "A", "stop", 2),
        (["BC", "CD"], "A", "stop", 2),
        (["DEFX", "CDE"], "AB", "stop", 3),
        ("ABCDEFGHIJ", "ABCDEF", "stop", 4),
        ("A", "", "stop", 1),
        ("ABC", "", "stop", 2),
        (["X", "F"], "ABCDE", "stop", 3),
    ],
)
@pytest.mark.parametrize("chat", [False, True])
async def test_stop_strings(endpoint, stop, text, reason, used, chat):
    api = endpoint([b"AB", b"CD", b"EF"])
    path, body = ("/v1/chat/completions", CHAT) if chat else ("/v1/completions", {"prompt": "p"})
    choices, answer = await api.both(path, body | {"stop": stop})
    assert (choices[0]["text"], choices[0]["finish_reason"]) == (text, reason)
    assert answer.chunks[-1]["usage"]["completion_tokens"] == used
    matched = used < 4
    assert len(api.backend.cancelled) == (2 if matched else 0)
    assert (choices[0]["stop_reason"] in ([stop] if isinstance(stop, str) else stop)) == matched


async def test_stop_strings_may_be_kept(endpoint):
    api = endpoint([b"AB", b"CD", b"EF"])
    choices, _ = await api.both("/v1/completions", {"prompt": "p", "stop": "BC", "include_stop_str_in_output": True})
    assert choices[0]["text"] == "ABC"


async def test_a_stop_string_with_a_cut_emoji(endpoint):
    api = endpoint([b"A", b"\xf0\x9f", b"\x98\x80", b" the"])
    choices, _ = await api.both("/v1/completions", {"prompt": "p", "stop": EMOJI + " t"})
    assert choices[0]["text"] == "A"


async def test_min_tokens_shields_from_stop_strings(endpoint):
    api = endpoint([b"AB", b"CD", b"AB", b"CD", b"EF"])
    choices, _ = await api.both("/v1/completions", {"prompt": "p", "stop": "CD", "min_tokens": 2})
    assert choices[0]["text"] == "ABCDAB"


async def test_no_chunk_is_empty_and_held_text_is_not_announced(endpoint):
    api = endpoint([b"AB", b"CD", b"EF"])
    answer = await api.stream("/v1/completions", {"prompt": "p", "stop": "BCDEFG"})
    assert [chunk["choices"][0]["text"] for chunk in answer.chunks] == ["A", "BCDEF"]
    answer = await api.stream("/v1/chat/completions", CHAT)
    assert answer.chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


async def test_stop_tokens(endpoint):
    api = endpoint([b"AB", b"CD", b"EF"])
    choices, answer = await api.both("/v1/completions", {"prompt": "p", "stop_token_ids": [259]})
    assert (choices[0]["text"], choices[0]["stop_reason"]) == ("AB", 259)
    assert answer.chunks[-1]["usage"]["completion_tokens"] == 2
    choices, _ = await api.both("/v1/completions", {"prompt": "p", "stop_token_ids": [259], "include_stop_str_in_output": True})
    assert choices[0]["text"] == "ABCD"


async def test_eos_is_hidden_unless_asked_for(endpoint):
    api = endpoint([b"AB"])
    choices, _ = await api.both("/v1/completions", {"prompt": "p"})
    assert (choices[0]["text"], choices[0]["finish_reason"], choices[0]["stop_reason"]) == ("AB", "stop", None)
    choices, _ = await api.both(
        "/v1/completions", {"prompt": "p", "ignore_eos": True, "max_tokens": 3, "skip_special_tokens": False}
    )
    assert (choices[0]["text"], choices[0]["finish_reason"]) == ("AB</s></s>", "length")
