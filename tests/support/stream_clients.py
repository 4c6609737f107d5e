"""Readers of event streams as clients in use have them: each gives the data of every event of a streamed answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import httpx
import openai
import requests

_DEADLINE_S = 30

Reader = Callable[[str, dict[str, Any]], list[str]]
"""Takes the URL of the endpoint and the body of a streamed completion."""


def by_openai(url: str, body: dict[str, Any]) -> list[str]:
    """The official client's own decoder, which drops the end marker."""
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=_DEADLINE_S) as client:
        chunks = client.completions.create(**body, model="toy", stream=True)
        return [*(chunk.to_json(indent=None) for chunk in chunks), "[DONE]"]


def by_httpx_lines(url: str, body: dict[str, Any]) -> list[str]:
    """`httpx`, line by line, as `str.splitlines` sees lines; what httpx-sse, too, is built on."""
    with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=_DEADLINE_S) as answer:
        return list(_data_of(answer.iter_lines()))


def by_requests_lines(url: str, body: dict[str, Any]) -> list[str]:
    """`requests`, line by line of decoded text."""
    with requests.post(f"{url}/v1/completions", json=body | {"stream": True}, stream=True, timeout=_DEADLINE_S) as answer:
        answer.encoding = "utf-8"
        return list(_data_of(answer.iter_lines(chunk_size=1, decode_unicode=True)))


def by_aiohttp_lines(url: str, body: dict[str, Any]) -> list[str]:
    """`aiohttp`, line by line of bytes."""

    async def read() -> list[str]:
        limit = aiohttp.ClientTimeout(total=_DEADLINE_S)
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            session.post(f"{url}/v1/completions", json=body | {"stream": True}) as answer,
        ):
            return list(_data_of([line.decode().rstrip("\r\n") async for line in answer.content]))

    return asyncio.run(read())


def by_event_source(url: str, body: dict[str, Any]) -> list[str]:
    """The rules of the HTML standard, section 9.2.6, character by character in pieces of any size."""
    events: list[str] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=_DEADLINE_S) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        text = "".join(answer.iter_text(7)).removeprefix("\ufeff")
    data: list[str] = []
    for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        field, _, value = line.partition(":")
        if line == "":
            events += ["\n".join(data)] if data else []
            data = []
        elif field == "data":
            data.append(value.removeprefix(" "))
        else:
            assert field in ("", "event", "id", "retry"), f"a line that belongs to no event: {line!r}"
    return events


READERS: dict[str, Reader] = {
    "openai": by_openai,
    "httpx": by_httpx_lines,
    "requests": by_requests_lines,
    "aiohttp": by_aiohttp_lines,
    "EventSource": by_event_source,
}


def _data_of(lines: Any) -> Iterator[str]:
    """The usual loop of clients: other lines than data lines are skipped if they are empty or comments, and nothing else is
    expected."""
    for line in lines:
        if line.startswith("data:"):
            yield line.removeprefix("data:").strip(" ")
        else:
            assert line == "" or line.startswith(":"), f"neither data, nor empty, nor a comment: {line!r}"
