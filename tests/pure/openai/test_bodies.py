"""Bodies of requests: compressed ones are read within the limit, and what is not JSON is refused by its header."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from typing import Any

import httpx
import pytest

from serve_app.openai.api import ApiSettings

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "hi", "max_tokens": 4}
PLAIN = json.dumps(BODY).encode()
ROUTES = [
    (COMPLETIONS, BODY),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/tokenize", {"prompt": "hi"}),
    ("/detokenize", {"tokens": [65]}),
]


def deflated(data: bytes) -> bytes:
    return zlib.compress(data)


async def post(api: Any, content: Any, coding: str | None, path: str = COMPLETIONS, **headers: str) -> httpx.Response:
    headers |= {} if coding is None else {"content-encoding": coding}
    answer: httpx.Response = await api.post(path, content=content, headers=headers)
    return answer


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize(
    ("coding", "compress"),
    [("gzip", gzip.compress), ("GZIP", gzip.compress), ("x-gzip", gzip.compress), ("deflate", deflated), ("identity", bytes),
     ("", bytes), ("identity, gzip", gzip.compress)],
)  # fmt: skip
async def test_every_route_reads_compressed_bodies(
    endpoint: Callable[..., Any], path: str, body: dict[str, Any], coding: str, compress: Callable[[bytes], bytes]
) -> None:
    api = endpoint([b"AB"])
    plain = await post(api, json.dumps(body).encode(), None, path, **{"x-request-id": "same"})
    answer = await post(api, compress(json.dumps(body).encode()), coding, path, **{"x-request-id": "same"})
    assert answer.status_code == plain.status_code == 200, answer.text
    told = {"choices", "usage", "tokens", "prompt"}
    assert {name: value for name, value in answer.json().items() if name in told} == {
        name: value for name, value in plain.json().items() if name in told
    }


@pytest.mark.parametrize("size", [1, 7, 10**6])
@pytest.mark.parametrize("members", [1, 2, 5])
async def test_the_parts_of_a_compressed_body_may_be_cut_anywhere(
    endpoint: Callable[..., Any], size: int, members: int
) -> None:
    cuts = [len(PLAIN) * at // members for at in range(members + 1)]
    data = b"".join(gzip.compress(PLAIN[start:stop]) for start, stop in pairwise(cuts))
    assert (await post(endpoint([b"AB"]), parts(data, size), "gzip")).status_code == 200


@pytest.mark.parametrize("coding", ["zstd", "br", "compress", "gzip, gzip", "gzip, zstd", "nonsense"])
async def test_other_compressions_are_named_and_so_are_those_that_are_read(endpoint: Callable[..., Any], coding: str) -> None:
    for content in (PLAIN, gzip.compress(PLAIN), b"", b"\x28\xb5\x2f\xfd"):
        answer = await post(endpoint([]), content, coding)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (415, "unsupported_content_encoding")
        assert answer.headers["accept-encoding"] == "gzip, deflate"
        assert "Content-Encoding" in error["message"]
        assert "gzip, deflate or identity" in error["message"]


@pytest.mark.parametrize(
    ("coding", "content"),
    [
        ("gzip", PLAIN),
        ("gzip", b"\xff\xfe"),
        ("gzip", deflated(PLAIN)),
        ("gzip", gzip.compress(PLAIN)[:-3]),
        ("gzip", b""),
        ("gzip", gzip.compress(PLAIN) + b"more"),
        ("gzip", gzip.compress(PLAIN)[:-8] + b"\0" * 8),
        ("deflate", PLAIN),
        ("deflate", gzip.compress(PLAIN)),
        ("deflate", deflated(PLAIN)[:-1]),
        ("deflate", deflated(PLAIN) + b"more"),
        (None, gzip.compress(PLAIN)),
    ],
    ids=range(12),
)
async def test_bodies_that_are_not_what_their_header_says(
    endpoint: Callable[..., Any], coding: str | None, content: bytes
) -> None:
    answer = await post(endpoint([]), content, coding)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_body")
    assert "UTF-8" not in error["message"]
    assert "JSON" not in error["message"]
    assert (coding or "gzip") in error["message"]


@pytest.mark.parametrize("compress", [gzip.compress, deflated])
async def test_the_limit_holds_for_what_comes_out(endpoint: Callable[..., Any], compress: Callable[[bytes], bytes]) -> None:
    coding = "gzip" if compress is gzip.compress else "deflate"
    limit = 3 * 2**20 + 17
    api = endpoint([b"AB"], ApiSettings(max_body_bytes=limit))
    fits = PLAIN + b" " * (limit - len(PLAIN))
    assert (await post(api, compress(fits), coding)).status_code == 200
    answer = await post(api, compress(fits + b" "), coding)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_body")
    assert f"larger than {limit} bytes when it is decompressed" in answer.json()["error"]["message"]


async def test_a_small_body_that_becomes_a_large_one_takes_no_memory(endpoint: Callable[..., Any]) -> None:
    limit = 2**20
    api = endpoint([], ApiSettings(max_body_bytes=limit))
    bomb = gzip.compress(bytes(200_000_000), 6)
    assert len(bomb) < limit
    tracemalloc.start()
    try:
        answer = await post(api, bomb, "gzip")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert answer.status_code == 400
    assert peak < 8 * limit


async def test_a_body_that_never_becomes_anything_is_bounded_too(endpoint: Callable[..., Any]) -> None:
    sent = 0

    async def empty_members() -> AsyncIterator[bytes]:
        nonlocal sent
        member = gzip.compress(b"") * 50
        while sent < 10**7:
            sent += len(member)
            yield member

    answer = await post(endpoint([], ApiSettings(max_body_bytes=10_000)), empty_members(), "gzip")
    assert answer.status_code == 400
    assert sent < 20_000


async def test_others_are_served_while_a_body_is_decompressed(endpoint: Callable[..., Any]) -> None:
    api = endpoint([], ApiSettings(max_body_bytes=10**8))
    decompressing = asyncio.create_task(post(api, gzip.compress(bytes(30_000_000)), "gzip"))
    served = 0
    while not decompressing.done():
        await asyncio.sleep(0)
        served += (await api.client.get("/health")).status_code == 200
    assert served > 5
    assert (await decompressing).status_code == 400


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize(
    ("kind", "is_read"),
    [
        ("application/json", True),
        ("Application/JSON; Charset=UTF-8", True),
        ('application/json;charset="utf-8"', True),
        ("application/vnd.api+json", True),
        ("application/json; charset=latin-1", False),
        ("application/json; charset=utf-16", False),
        ("text/plain", False),
        ("text/plain;charset=UTF-8", False),
        ("text/json", False),
        ("application/x-www-form-urlencoded", False),
        ("multipart/form-data; boundary=x", False),
        ("application/octet-stream", False),
        ("application/jsonl", False),
        ("nonsense", False),
        ("", False),
    ],
)
async def test_only_json_is_read(
    endpoint: Callable[..., Any], path: str, body: dict[str, Any], kind: str, is_read: bool
) -> None:
    api = endpoint([b"AB"])
    answer = await api.post(path, content=json.dumps(body).encode(), headers={"content-type": kind})
    if is_read:
        assert answer.status_code == 200, answer.text
        return
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert "Content-Type: application/json" in answer.json()["error"]["message"]
    assert api.backend.requests == []


async def test_a_body_without_a_media_type_is_not_read(endpoint: Callable[..., Any]) -> None:
    answer = await endpoint([]).client.post(COMPLETIONS, content=PLAIN)
    assert answer.status_code == 415


def parts(data: bytes, size: int) -> AsyncIterator[bytes]:
    async def sent() -> AsyncIterator[bytes]:
        for at in range(0, len(data), size):
            yield data[at : at + size]

    return sent()
