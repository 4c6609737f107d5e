"""The HTTP process under abuse, and its death: nobody hangs, the engine gets its blocks back, the next answer is exact."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.ray.server import Server, serving, wait_until
from tests.ray.streaming import Stream, body
from tests.support.models.tiny_models import tiny

pytestmark = pytest.mark.long

LONG = 30_000
QUESTION = body([5, 9, 42], 8)
SOON_S = 10
BACK_S = 60
INGRESS = "ray::ServeReplica:shardwright:Ingress"
GROWTH_BYTES = 200 * 2**20


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    folder = str(tiny("llama3", max_position_embeddings=2**16).folder)
    with serving(folder, "--dtype", "float32", "--max-model-len", "40000") as running:
        yield running


@pytest.fixture(scope="module")
def answer(server: Server) -> list[int]:
    return asked(server)


@pytest.mark.parametrize("given", [None, "mine-1", "bad id", "x" * 500])
def test_an_answer_has_one_request_id(server: Server, given: str | None) -> None:
    headers = {} if given is None else {"x-request-id": given}
    for path in ("/health", "/nowhere"):
        [sent] = server.client.get(path, headers=headers).headers.get_list("x-request-id")
        assert sent == "mine-1" if given == "mine-1" else sent != given


def test_garbage_on_the_port_disturbs_nobody(server: Server, answer: list[int]) -> None:
    text = json.dumps(QUESTION)
    whole = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
    rubbish = [
        random.Random(0).randbytes(1 << 16),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 2**20 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        whole.encode()[:40],
        b"",
    ]
    for bytes_ in rubbish:
        with socket.create_connection(("127.0.0.1", server.port), timeout=SOON_S) as client:
            try:
                client.sendall(bytes_)
                client.shutdown(socket.SHUT_WR)
                while client.recv(1 << 16):
                    pass
            except ConnectionError:  # the server's answer to rubbish may be to hang up
                continue
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall((whole + text).encode() * 3)
        seen = b""
        while seen.count(b"HTTP/1.1 200") < 3 or not seen.endswith(b"}"):
            more = client.recv(1 << 16)
            assert more, seen
            seen += more
    idle(server)
    assert asked(server) == answer


def test_a_flood_of_clients_that_leave_or_do_not_read(server: Server, answer: list[int]) -> None:
    [ingress] = server.named(INGRESS)
    before = ingress.memory_info().rss
    reading = Stream(server.url, body([3, 4], LONG))
    with ThreadPoolExecutor(50) as clients:
        ends = [clients.submit(leave if index % 5 else do_not_read, server, index) for index in range(50)]
        for end in ends:
            end.result()
    grown = ingress.memory_info().rss - before
    assert grown < GROWTH_BYTES
    reading.wait_for(1)
    reading.leave()
    idle(server)
    assert asked(server) == answer


def test_a_killed_ingress_loses_its_requests_and_nothing_else(server: Server, answer: list[int]) -> None:
    """Serve gives a new one the port's requests; the engine drops what nobody waits for any more."""
    stream = Stream(server.url, body([7, 8], LONG)).wait_for(3)
    plain: list[httpx.Response] = []
    ask = threading.Thread(
        target=lambda: plain.append(httpx.post(f"{server.url}/v1/completions", json=body([9], LONG), timeout=60))
    )
    ask.start()
    wait_until(lambda: server.gauge("running") == 2, SOON_S, lambda: f"{server.gauges()}")
    [ingress] = server.named(INGRESS)
    ingress.kill()
    killed = time.monotonic()
    ask.join(SOON_S)
    assert [each.status_code for each in plain] == [503]
    assert plain[0].json()["error"]["code"] == "ingress_lost"
    assert stream.finish().chunks[-1]["error"]["code"] == "ingress_lost"
    assert time.monotonic() - killed < SOON_S
    wait_until(lambda: server.health() == 200, BACK_S, lambda: "no new ingress")
    idle(server)
    assert asked(server) == answer


def asked(server: Server) -> list[int]:
    tokens: list[int] = server.post("/v1/completions", QUESTION)["choices"][0]["token_ids"]
    return tokens


def idle(server: Server) -> None:
    """Soon the engine holds nothing for anybody."""
    wait_until(lambda: server.gauge("running") + server.gauge("waiting") == 0, SOON_S, lambda: f"{server.gauges()}")
    assert server.gauge("total_blocks") == server.gauge("free_blocks") + server.gauge("cached_blocks")


def leave(server: Server, seed: int) -> None:
    """Read a random part of a stream, then hang up."""
    left = random.Random(seed).randrange(20)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body([seed, 1], LONG) | {"stream": True}, timeout=60) as got:
        for _ in got.iter_lines():
            if (left := left - 1) < 0:
                return


def do_not_read(server: Server, seed: int) -> None:
    """Ask for a stream, leave it unread till the connection is full, then read on and hang up."""
    text = json.dumps(body([seed, 1], LONG) | {"stream": True, "logprobs": 5})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect(("127.0.0.1", server.port))
        client.sendall((head + text).encode())
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        time.sleep(5)
        for _ in range(10):
            assert client.recv(4096)
