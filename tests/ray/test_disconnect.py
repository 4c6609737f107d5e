"""Clients that leave in the middle: what they held is given back at once, and nobody else notices."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.ray.server import Server, serving, wait_until
from tests.ray.streaming import Stream, body
from tests.support.models.tiny_models import tiny

pytestmark = pytest.mark.long

SOON_S = 5
"""Generous for a loaded machine; the work that is left would take minutes."""
LONG = 30_000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    folder = str(tiny("llama3", max_position_embeddings=2**16).folder)
    with serving(folder, "--layout", "tp=2", "--dtype", "float32", "--max-model-len", "40000") as running:
        yield running


def test_a_stream_whose_client_leaves_is_aborted(server: Server) -> None:
    aborts = idle_aborts(server)
    bystander = Stream(server.url, body([3, 4], 1500)).wait_for(1)
    leaver = Stream(server.url, body([7, 8], LONG)).wait_for(3)
    leaver.leave()
    wait_until(lambda: server.gauge("running") <= 1, SOON_S, lambda: f"still running: {server.gauges()}")
    assert bystander.finish().tokens == alone(server, [3, 4], 1500)
    wait_until(lambda: idle_aborts(server) == aborts + 1, SOON_S, lambda: f"{server.gauges()}")


def test_a_plain_request_whose_client_leaves_is_aborted(server: Server) -> None:
    aborts = idle_aborts(server)
    text = '{"prompt": [7, 8], "max_tokens": 30000, "ignore_eos": true}'
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
        )
        client.sendall((head + text).encode())
        wait_until(lambda: server.gauge("running") == 1, SOON_S, lambda: f"never ran: {server.gauges()}")
    wait_until(lambda: server.gauge("running") == 0, SOON_S, lambda: f"still running: {server.gauges()}")
    wait_until(lambda: idle_aborts(server) > aborts, SOON_S, lambda: f"{server.gauges()}")
    assert idle_aborts(server) == aborts + 1


def test_requests_that_end_by_themselves_are_no_aborts(server: Server) -> None:
    aborts = idle_aborts(server)
    for count in (1, 2, 17):
        alone(server, [count, 2, 3], count)
        Stream(server.url, body([count, 2, 3], count)).finish()
    assert idle_aborts(server) == aborts


def idle_aborts(server: Server) -> float:
    """Aborts so far, on an engine that holds no block for anybody."""
    [gauges] = server.gauges().values()
    wait_until(lambda: server.gauge("running") == 0, SOON_S, lambda: f"{server.gauges()}")
    held = gauges["total_blocks"] - server.gauge("free_blocks") - server.gauge("cached_blocks")
    assert held == 0
    return server.gauge("aborts")


def alone(server: Server, prompt: list[int], count: int) -> list[int]:
    tokens: list[int] = server.post("/v1/completions", body(prompt, count))["choices"][0]["token_ids"]
    assert len(tokens) == count
    return tokens
