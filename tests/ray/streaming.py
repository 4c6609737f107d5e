"""A streamed completion that runs in the background while the test does something to the server."""

from __future__ import annotations

import json
import queue
import threading
from typing import Any

import httpx

_WAIT_S = 60.0


def body(prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy request for exactly so many tokens."""
    fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"prompt": prompt, "max_tokens": max_tokens, **fixed, **more}


class Stream:
    """The answer to a streamed request, read by a thread of its own."""

    def __init__(
        self, url: str, request: dict[str, Any], path: str = "/v1/completions", headers: dict[str, str] | None = None
    ) -> None:
        self.status = 0
        self._headers = headers or {}
        self.data: list[str] = []
        self._arrived: queue.Queue[str | None] = queue.Queue()
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(url + path, request | {"stream": True}), daemon=True)
        self._thread.start()

    def wait_for(self, events: int) -> Stream:
        """Return once so many more events came."""
        for _ in range(events):
            assert self._arrived.get(timeout=_WAIT_S) is not None, f"it ended early: {self.data[-2:]}"
        return self

    def leave(self) -> None:
        """Close the connection in the middle of the answer."""
        self._leave.set()
        self._thread.join(_WAIT_S)
        assert not self._thread.is_alive()

    def finish(self, timeout_s: float = _WAIT_S) -> Stream:
        """Read to the end."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"still streaming after {len(self.data)} events"
        return self

    @property
    def ended(self) -> bool:
        """Whether the answer is over, well or not."""
        return not self._thread.is_alive()

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The events before the end marker."""
        assert self.data[-1] == "[DONE]", self.data[-2:]
        return [json.loads(line) for line in self.data[:-1]]

    @property
    def tokens(self) -> list[int]:
        """The tokens of a stream that ended well."""
        assert not [chunk for chunk in self.chunks if "error" in chunk], self.data[-2:]
        return [token for chunk in self.chunks for choice in chunk["choices"] for token in choice.get("token_ids", [])]

    @property
    def tokens_so_far(self) -> list[int]:
        """The tokens of a stream that still runs, or was left."""
        chunks = [json.loads(line) for line in list(self.data)]
        return [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids", [])]

    @property
    def text(self) -> str:
        """The text of a completion or chat stream that ended well."""
        choices = [choice for chunk in self.chunks for choice in chunk["choices"]]
        return "".join(part.get("text") or part.get("delta", {}).get("content") or "" for part in choices)

    def _read(self, url: str, request: dict[str, Any]) -> None:
        try:
            # No TLS here, so no certificates: to load them takes this thread seconds while others of its process read streams.
            with httpx.stream("POST", url, json=request, headers=self._headers, timeout=_WAIT_S, verify=False) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.data.append(line.removeprefix("data: "))
                        self._arrived.put(self.data[-1])
                    if self._leave.is_set():
                        return
        except httpx.TransportError as error:
            self.data.append(repr(error))
        finally:
            self._arrived.put(None)
