"""Ranks and replicas that die or hang under load: clean errors, no orphans, back in service with the same answers."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest

from tests.ray.server import Server, serving, wait_until
from tests.ray.streaming import Stream, body
from tests.support.models.tiny_models import tiny

STEP_TIMEOUT_S = 5
LONG = 30_000
"""Tokens that take longer than any test."""
QUESTION = body([5, 9, 42], 8)
CLIENTS = 2


def long_model() -> str:
    return str(tiny("llama3", max_position_embeddings=2**16).folder)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(
        long_model(),
        "--layout",
        "tp=2",
        "--dtype",
        "float32",
        "--max-model-len",
        "40000",
        "--step-timeout",
        str(STEP_TIMEOUT_S),
    ) as running:
        yield running


@pytest.mark.long
def test_a_killed_rank_ends_its_stream_and_the_service_comes_back(server: Server) -> None:
    before, after = lose_a_rank(server, signal.SIGKILL, unhealthy_within_s=10)
    assert before == after


@pytest.mark.long
def test_a_stuck_rank_is_found_by_the_step_watchdog(server: Server) -> None:
    before, after = lose_a_rank(server, signal.SIGSTOP, unhealthy_within_s=STEP_TIMEOUT_S + 5)
    assert before == after


@pytest.mark.long
def test_a_stuck_rank_of_an_idle_server_is_found_by_the_next_request(server: Server) -> None:
    before = server.post("/v1/completions", QUESTION)["choices"][0]
    old = server.ranks()
    old[0].send_signal(signal.SIGSTOP)
    failed = server.client.post("/v1/completions", json=QUESTION)
    assert failed.status_code == 500
    assert "step" in failed.json()["error"]["message"]
    back_in_service(server, old)
    assert server.post("/v1/completions", QUESTION)["choices"][0]["token_ids"] == before["token_ids"]


@pytest.mark.long
def test_a_killed_replica_is_replaced(server: Server) -> None:
    before = server.post("/v1/completions", QUESTION)["choices"][0]
    old = server.ranks()
    stream = Stream(server.url, body([7, 8], LONG)).wait_for(3)
    [engine] = server.named("ray::ServeReplica:shardwright:Engine")
    engine.kill()
    error_then_done(stream)
    wait_until(lambda: server.health() != 200, 10, lambda: "healthy without a replica")
    back_in_service(server, old)
    assert server.post("/v1/completions", QUESTION)["choices"][0]["token_ids"] == before["token_ids"]


def test_one_replica_down_goes_unnoticed_by_the_others_clients() -> None:
    with serving(long_model(), "--layout", "replicas=2", "--dtype", "float32", "--max-model-len", "40000") as server:
        before = server.post("/v1/completions", QUESTION)["choices"][0]["token_ids"]
        # One after the other, so that each replica gets two; none ends by itself, however slowly the others begin.
        streams = [Stream(server.url, body([index, 8], LONG)).wait_for(1) for index in range(4)]
        old = server.ranks()
        wait_until(lambda: [each["running"] for each in server.gauges().values()] == [2, 2], 10, lambda: f"{server.gauges()}")
        old[0].kill()
        answers = ask_until(server, lambda: len(server.gauges()) == 2 and len(fresh_ranks(server, old)) == 1)
        failed = [answer for answer in answers if answer[0] != 200]
        assert len(failed) <= CLIENTS, f"more than was in flight when the rank died: {failed}"
        assert all(tokens == before for status, tokens in answers if status == 200)
        # What a stream was sent before comes first, however far behind its reader is.
        wait_until(lambda: sum(stream.ended for stream in streams) == 2, 60, lambda: f"{[len(each.data) for each in streams]}")
        lost = [stream for stream in streams if stream.ended]
        for stream in lost:
            error_then_done(stream)
        for index, stream in enumerate(streams):
            if stream not in lost:
                count = len(stream.tokens_so_far)
                wait_until(
                    lambda stream=stream, count=count: len(stream.tokens_so_far) > count, 10, lambda: "it goes on no more"
                )
                stream.leave()
                expected = server.post("/v1/completions", body([index, 8], 100))["choices"][0]["token_ids"]
                assert stream.tokens_so_far[:100] == expected


def lose_a_rank(server: Server, sign: int, unhealthy_within_s: float) -> tuple[list[int], list[int]]:
    """What the server answered before it lost a rank in the middle of a stream, and what it answers once it is back."""
    before = server.post("/v1/completions", QUESTION)["choices"][0]
    old = server.ranks()
    assert len(old) == 2
    stream = Stream(server.url, body([7, 8], LONG)).wait_for(3)
    began = time.monotonic()
    old[1].send_signal(sign)
    wait_until(lambda: server.health() != 200, unhealthy_within_s, lambda: "still healthy")
    error_then_done(stream)
    back_in_service(server, old)
    assert time.monotonic() - began < 60
    return before["token_ids"], server.post("/v1/completions", QUESTION)["choices"][0]["token_ids"]


def error_then_done(stream: Stream) -> None:
    chunks = stream.finish().chunks
    assert stream.status == 200
    assert "error" in chunks[-1]
    assert not any("error" in chunk for chunk in chunks[:-1])
    assert len(chunks) > 3


def back_in_service(server: Server, old: list[psutil.Process]) -> None:
    wait_until(lambda: server.health() == 200, 60, lambda: f"not back: {server.client.get('/health').text}")
    wait_until(lambda: not any(each.is_running() for each in old), 10, lambda: f"orphans: {old}")
    assert len(server.ranks()) == len(old)


def fresh_ranks(server: Server, old: list[psutil.Process]) -> list[psutil.Process]:
    return [each for each in server.ranks() if each not in old]


def ask_until(server: Server, over: Callable[[], bool]) -> list[tuple[int, list[int]]]:
    """Ask without a pause, some clients at once, until the condition has held; every answer."""
    answers: list[tuple[int, list[int]]] = []
    stop = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not stop.is_set():
                response = client.post("/v1/completions", json=QUESTION)
                ok = response.status_code == 200
                answers.append((response.status_code, response.json()["choices"][0]["token_ids"] if ok else [response.text]))

    clients = [threading.Thread(target=ask) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        wait_until(over, 60, lambda: f"{server.gauges()}, {server.ranks()}")
    finally:
        stop.set()
        for client in clients:
            client.join()
    return answers
