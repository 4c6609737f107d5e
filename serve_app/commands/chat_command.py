"""``shardwright chat``: a terminal chat with a running endpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
from rich.console import Console

from serve_app.commands.endpoint_health import uses_proxy

_TIMEOUT = httpx.Timeout(10.0, read=None)


def run_chat(url: str, *, system: str | None, max_tokens: int, temperature: float, api_key: str | None) -> None:
    """Run a chat in the terminal with the endpoint at `url`: read lines, stream the answers and keep the conversation until end
    of input or ``/quit``; ``/new`` starts over.

    `system` is the system message, `max_tokens` the limit of an answer in tokens, and `api_key` the bearer key; None: no such
    message or key. Errors are printed and the chat goes on, except that it exits with 1 if the endpoint cannot be reached.
    """
    console = Console()
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    console.print(f"Chatting with {url}. /new starts over, /quit (or Ctrl-D) ends.", style="dim")
    with httpx.Client(base_url=url, timeout=_TIMEOUT, headers=headers, trust_env=uses_proxy(url)) as client:
        while (line := _ask(console)) is not None:
            if line == "/new":
                messages = list(opening)
                continue
            messages.append({"role": "user", "content": line})
            try:
                answer = _answer(client, {"messages": messages, "max_tokens": max_tokens, "temperature": temperature})
            except (httpx.HTTPError, RuntimeError) as error:
                messages.pop()
                console.print(f"error: {error}", style="red")
                if isinstance(error, httpx.ConnectError):
                    raise SystemExit(1) from error
                continue
            messages.append({"role": "assistant", "content": answer})


def _ask(console: Console) -> str | None:
    while True:
        try:
            line = console.input("[bold cyan]you>[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            return None
        if line == "/quit":
            return None
        if line:
            return line


def _answer(client: httpx.Client, body: dict[str, Any]) -> str:
    """Stream one answer to the terminal and return it as a whole. Ctrl-C interrupts the answer, not the chat."""
    pieces: list[str] = []
    try:
        for piece in _pieces(client, body):
            pieces.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" [cut]", end="", file=sys.stderr)
    print()
    return "".join(pieces)


def _pieces(client: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        if response.status_code != 200:
            raise RuntimeError(_error_text(response.read()))
        for line in _lines(response.iter_bytes()):
            data = line.removeprefix("data: ")
            if not line.startswith("data: ") or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            for choice in event.get("choices", []):
                yield choice["delta"].get("content") or ""


def _lines(parts: Iterable[bytes]) -> Iterator[str]:
    """Yields the lines of an event stream. Only newlines end them: httpx also breaks at characters such as U+2028, which may be
    a part of the text."""
    rest = b""
    for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line.removesuffix(b"\r").decode()


def _error_text(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]
