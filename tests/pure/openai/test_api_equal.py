"""Streamed and whole answers are equal, and equal to a plain reading of the tokens, for any script and stop list."""

from __future__ import annotations

import asyncio

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PIECES = st.sampled_from([65, 66, 67, 0xF0, 0x9F, 0x98, 0x80, 0xC3, 0xA9, 32, *range(256, 266)])
EVENTS = st.lists(st.lists(PIECES, max_size=4), max_size=12)
STOPS = st.lists(st.text("ABCDEF😀 é", min_size=1, max_size=4), max_size=4)


def plainly(tokenizer, tokens, stops, include, skip):
    """The rule, written the slow way: the text after each character, until a stop string ends it."""
    text = tokenizer.decode(tokens, skip_special_tokens=skip)
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end if include else end - max(map(len, found))], True
    return text, False


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=EVENTS, stops=STOPS, include=st.booleans(), skip=st.booleans(), limit=st.integers(1, 30))
def test_any_script(endpoint, tokenizer, events, stops, include, skip, limit):
    api = endpoint(events)
    body = {
        "prompt": "p", "max_tokens": limit, "stop": stops, "include_stop_str_in_output": include, "ignore_eos": True,
        "skip_special_tokens": skip, "logprobs": 1, "return_token_ids": True,
    }  # fmt: skip
    choices, _ = asyncio.run(api.both("/v1/completions", body))
    said = [*(token for event in events for token in event), *[257] * limit][:limit]
    text, stopped = plainly(tokenizer, said, stops, include, skip)
    assert choices[0]["text"] == text
    assert choices[0]["finish_reason"] == ("stop" if stopped else "length")
    assert choices[0]["token_ids"] == said[: len(choices[0]["token_ids"])]
    assert len(choices[0]["logprobs"]["tokens"]) == len(choices[0]["token_ids"])
    # The last token counted is the one that completed the stop string.
    if stopped and len(choices[0]["token_ids"]) < len(said):
        assert not plainly(tokenizer, said[: len(choices[0]["token_ids"]) - 1], stops, include, skip)[1]
