"""Streams in the queue of a real server: Serve's proxy passes on the head and every comment line at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.ray.server import Server, serving, wait_until
from tests.ray.streaming import Stream, body
from tests.support.models.tiny_models import tiny

pytestmark = pytest.mark.long

SOON_S = 10
LONG = 30_000
PAGE = "http://localhost:3000"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    folder = str(tiny("llama3", max_position_embeddings=2**16).folder)
    queue = ("--max-sequences", "1", "--max-waiting", "1", "--sse-ping", "0.2", "--allow-origin", PAGE)
    with serving(folder, "--dtype", "float32", "--max-model-len", "40000", *queue) as running:
        yield running


def test_a_queued_stream_has_begun_is_pinged_and_may_be_left(server: Server) -> None:
    first = Stream(server.url, body([3, 4], LONG)).wait_for(1)
    aborts, leave, comments = server.gauge("aborts"), threading.Event(), list[float]()
    heads: list[httpx.Response] = []

    def wait_in_the_queue() -> None:
        asked = body([5, 6], LONG) | {"stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, headers={"origin": PAGE}, timeout=60) as answer:
            heads.append(answer)
            for line in answer.iter_lines():
                assert line == "" or line.startswith(":"), line
                comments.extend([time.monotonic()] if line else [])
                if leave.is_set():
                    return

    waiting = threading.Thread(target=wait_in_the_queue)
    waiting.start()
    wait_until(lambda: len(comments) >= 5, SOON_S, lambda: f"{heads} {comments} {server.gauges()}")
    assert (heads[0].status_code, heads[0].headers["access-control-allow-origin"]) == (200, PAGE)
    assert server.gauge("waiting") == 1
    assert comments[4] - comments[0] > 0.5, "they were held back, and came together"

    full = server.client.post("/v1/completions", json=body([7], 4) | {"stream": True}, headers={"origin": PAGE})
    assert (full.status_code, full.json()["error"]["code"]) == (429, "engine_busy")
    assert full.headers["access-control-allow-origin"] == PAGE

    leave.set()
    waiting.join(SOON_S)
    wait_until(lambda: server.gauge("aborts") == aborts + 1, SOON_S, lambda: f"not noticed: {server.gauges()}")
    assert server.gauge("waiting") == 0
    assert not first.ended
    first.leave()
    assert Stream(server.url, body([9], 3)).finish().tokens
