"""Ranks and replicas that die or hang under load: no request is lost or changed, no orphans stay, and all come back."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import psutil
import pytest

from tests.ray.server import Server, serving, wait_until
from tests.ray.streaming import Stream, body
from tests.support.models.tiny_models import tiny

STEP_TIMEOUT_S = 5
LENGTH = 500
"""Tokens that take long enough to lose something meanwhile."""
PATIENCE_S = 90.0
SAMPLINGS: list[dict[str, object]] = [
    {},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    {"temperature": 0.8, "seed": 4, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
]
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
def test_a_stream_outlives_a_killed_rank(server: Server) -> None:
    lose_a_rank(server, signal.SIGKILL, unhealthy_within_s=2)


@pytest.mark.long
def test_a_stream_outlives_a_stuck_rank(server: Server) -> None:
    lose_a_rank(server, signal.SIGSTOP, unhealthy_within_s=STEP_TIMEOUT_S + 5)


@pytest.mark.long
def test_a_stuck_rank_of_an_idle_server_is_found_by_the_next_request(server: Server) -> None:
    before = server.post("/v1/completions", QUESTION)["choices"][0]
    old = server.ranks()
    old[0].send_signal(signal.SIGSTOP)
    assert server.post("/v1/completions", QUESTION)["choices"][0]["token_ids"] == before["token_ids"]
    back_in_service(server, old)


@pytest.mark.long
def test_streams_outlive_a_killed_replica(server: Server) -> None:
    """Greedy ones and sampled ones with a seed, and a plain request; each goes on where it was."""
    asked = [body([7, number], LENGTH, **sampling) for number, sampling in enumerate(SAMPLINGS)]
    expected = quiet(server, asked)
    old = server.ranks()
    streams = [Stream(server.url, each).wait_for(3) for each in asked]
    with ThreadPoolExecutor(1) as plain:
        answer = plain.submit(server.post, "/v1/completions", asked[0])
        [engine] = server.named("ray::ServeReplica:shardwright:Engine")
        engine.kill()
        assert [stream.finish(PATIENCE_S).tokens for stream in streams] == expected
        assert answer.result()["choices"][0]["token_ids"] == expected[0]
    back_in_service(server, old)


def test_one_replica_down_goes_unnoticed_by_every_client() -> None:
    with serving(long_model(), "--layout", "replicas=2", "--dtype", "float32", "--max-model-len", "40000") as server:
        before = server.post("/v1/completions", QUESTION)["choices"][0]["token_ids"]
        asked = [body([index, 8], LENGTH) for index in range(4)]
        expected = quiet(server, asked)
        old = server.ranks()
        # One after the other, so that each replica gets two.
        streams = [Stream(server.url, each).wait_for(1) for each in asked]
        wait_until(lambda: [each["running"] for each in server.gauges().values()] == [2, 2], 10, lambda: f"{server.gauges()}")
        old[0].kill()
        answers = ask_until(server, lambda: len(server.gauges()) == 2 and len(fresh_ranks(server, old)) == 1)
        assert {(status, tuple(tokens)) for status, tokens in answers} == {(200, tuple(before))}
        assert [stream.finish(PATIENCE_S).tokens for stream in streams] == expected
        assert server.service_gauge("requests_replayed") >= 2
        assert server.service_gauge("requests_given_up") == 0


def lose_a_rank(server: Server, sign: int, unhealthy_within_s: float) -> None:
    """Lose a rank in the middle of a stream: the service is down until it has new ones, and then the stream goes on."""
    asked = body([7, 8], LENGTH)
    expected = server.post("/v1/completions", asked)["choices"][0]["token_ids"]
    old = server.ranks()
    assert len(old) == 2
    stream = Stream(server.url, asked).wait_for(3)
    began = time.monotonic()
    old[1].send_signal(sign)
    wait_until(lambda: server.health() != 200, unhealthy_within_s, lambda: "still healthy")
    assert stream.finish(PATIENCE_S).tokens == expected
    assert stream.status == 200
    back_in_service(server, old)
    assert time.monotonic() - began < 60


def quiet(server: Server, asked: list[dict[str, Any]]) -> list[list[int]]:
    """The tokens that the server answers with while nothing is lost."""
    with ThreadPoolExecutor(len(asked)) as clients:
        answers = list(clients.map(partial(server.post, "/v1/completions"), asked))
    return [answer["choices"][0]["token_ids"] for answer in answers]


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
