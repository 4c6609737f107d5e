"""Prefill and decode pools over HTTP, with SmolLM2: KV goes from process to process over NIXL."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest

from actors.engine.config.engine_config import EngineConfig
from actors.kv_transfer.nixl_transport import is_installed
from actors.wire.requests import GenerateRequest, SamplingParams
from serve_app.text.model_files import read_text_files
from tests.ray.server import Server, run, serving, wait_until
from tests.ray.streaming import Stream, body
from tests.support.inprocess import in_process
from tests.support.long_cases import long
from tests.support.models.smollm2 import saved_smollm2, smollm2_file

pytestmark = pytest.mark.skipif(not is_installed(), reason="NIXL is not installed: pip install 'shardwright[pools]'")

NEEDS_PREFILL = ("cp=2", "tp=2")
"""Here it is also seen what becomes of requests while the prefill pool is gone."""
PAIRS = [
    ("tp=2", "pp=2"),
    *long(NEEDS_PREFILL, ("attn_dp=2", "tp=2,tp_shares=2/1")),
]
ROLES = ("prefill", "decode")
STORY = " ".join(f"Item {number} costs {number * 7} dollars." for number in range(60))
PROMPTS = ["The capital of France is Paris, and the capital of Germany is Berlin. The capital of Italy is", STORY, "Once"]
KV_BYTES = 30 * 2 * 3 * 64 * 4
"""Of a token of SmolLM2 in fp32."""


def ask(server: Server, prompt: str, **fields: object) -> dict[str, object]:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True, "ignore_eos": True, **fields}
    answer = server.post("/v1/completions", body)
    return {"tokens": answer["choices"][0]["token_ids"], "prompt_tokens": answer["usage"]["prompt_tokens"]}


@pytest.fixture(scope="module")
def expected() -> list[dict[str, object]]:
    files = read_text_files(smollm2_file())
    assert files.tokenizer is not None
    prompts = [files.tokenizer.encode(prompt, add_special_tokens=True) for prompt in PROMPTS]
    sampling = SamplingParams(temperature=0)
    with in_process(saved_smollm2(), "", EngineConfig(num_blocks=200, max_model_len=2048, max_sequences=4)) as alone:
        answers = [alone.run(GenerateRequest(request_id="", prompt=each, max_tokens=8, sampling=sampling)) for each in prompts]
    return [{"tokens": each.tokens, "prompt_tokens": len(prompt)} for prompt, each in zip(prompts, answers, strict=True)]


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_tokens_equal_those_of_one_rank(expected: list[dict[str, object]], prefill: str, decode: str) -> None:
    required = ["--require-prefill"] if (prefill, decode) == NEEDS_PREFILL else []
    with serving("--prefill", prefill, "--decode", decode, "--dtype", "float32", "--threads", "1", *required) as server:
        assert (server.gauge("handoff_sent"), server.gauge("handoff_received")) == (1, 1)  # tried before it was ready
        before = server.gauge("handoff_sent_bytes")
        assert [ask(server, prompt) for prompt in PROMPTS] == expected
        handed = sum(found["prompt_tokens"] for found in expected[:2])  # the third is short
        wait_until(lambda: server.gauge("handoff_sent") == 3, 10, lambda: str(server.gauges()))
        assert (server.gauge("handoff_received"), server.gauge("handoff_fallen_back")) == (3, 0)
        assert server.gauge("handoff_sent_bytes") - before == handed * KV_BYTES
        if required:
            without_prefill_there_is_no_service(server)
            assert [ask(server, prompt) for prompt in PROMPTS] == expected


def without_prefill_there_is_no_service(server: Server) -> None:
    """C05: where a prefill pool is required and gone, nothing is ready, requests are refused, and none hangs."""
    replica(server, "Prefill").send_signal(signal.SIGKILL)
    wait_until(lambda: server.health() == 503, 15, lambda: server.client.get("/health").text)
    assert "prompts are not handed off: no other replica takes prompts" in server.client.get("/health").json()["reason"]
    began = time.monotonic()
    refused = server.client.post("/v1/completions", json={"prompt": STORY, "max_tokens": 4})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_down")
    assert time.monotonic() - began < 5
    wait_until(lambda: server.health() == 200, 120, lambda: server.client.get("/health").text)


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where commands find the server of these tests."""
    return {"XDG_RUNTIME_DIR": str(tmp_path_factory.mktemp("session"))}


@pytest.fixture(scope="module")
def server(mine: dict[str, str]) -> Iterator[Server]:
    with serving("--prefill", "tp=2", "--decode", "tp=1", "--dtype", "float32", "--threads", "1", env=mine) as server:
        yield server


def replica(server: Server, name: str) -> psutil.Process:
    [found] = server.named(f"ray::ServeReplica:shardwright:{name}")
    return found


def held_blocks(server: Server) -> float:
    return sum(server.gauge(name) * sign for name, sign in (("total_blocks", 1), ("free_blocks", -1), ("cached_blocks", -1)))


@pytest.mark.long
def test_clients_that_leave_are_the_only_aborts(server: Server) -> None:
    """C02: streams and plain requests, while their prompt is computed elsewhere and while they decode."""
    wait_until(lambda: held_blocks(server) == 0, 30, lambda: str(server.gauges()))
    aborts = of_role(server, "decode", "aborts")
    short, long = [list(range(100 + number, 140 + number)) for number in range(4)], [7, 8, 9, 10] * 200
    solo = [Stream(server.url, body(prompt, 12, cache_salt="solo")).finish().tokens for prompt in short]
    streams = [Stream(server.url, body(prompt, 12, cache_salt="all")).wait_for(1) for prompt in short[:2]]
    with ThreadPoolExecutor(8) as pool:
        plain = [pool.submit(server.post, "/v1/completions", body(prompt, 12, cache_salt="all")) for prompt in short[2:]]
        Stream(server.url, body(short[0], 900, cache_salt="left")).wait_for(3).leave()
        with sent(server, body(short[1], 900, cache_salt="left"), "handoff_received"):
            assert of_role(server, "decode", "running") > 0
        for turn, streamed in enumerate([True, False]):
            with sent(server, body(long, 900, cache_salt=f"left {turn}", stream=streamed), "handoff_reservations"):
                assert of_role(server, "decode", "handoff_reserved") > 0
        assert [stream.finish().tokens for stream in streams] == solo[:2]
        assert [each.result()["choices"][0]["token_ids"] for each in plain] == solo[2:]
        wait_until(lambda: held_blocks(server) == 0, 30, lambda: str(server.gauges()))
        assert (of_role(server, "decode", "aborts"), server.gauge("handoff_outlived")) == (aborts + 4, 0)
        of_all, handed = server.gauge("aborts"), server.gauge("handoff_received")
        prompts = [[20 + number // 10, 30 + number % 10] * 10 for number in range(100)]
        list(pool.map(lambda prompt: server.post("/v1/completions", body(prompt, 2)), prompts))
        wait_until(lambda: held_blocks(server) == 0, 30, lambda: str(server.gauges()))
        assert server.gauge("handoff_received") == handed + 100
        assert server.gauge("aborts") == of_all


@contextmanager
def sent(server: Server, request: dict[str, object], until: str) -> Iterator[None]:
    """A request whose client leaves with the block, which begins when one of the engine's numbers has risen."""
    text, before = json.dumps(request), server.gauge(until)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(text)}"
        client.sendall(f"{head}\r\n\r\n{text}".encode())
        wait_until(lambda: server.gauge(until) > before, 60, lambda: str(server.gauges()), every_s=0.01)
        yield


def of_role(server: Server, role: str, name: str) -> float:
    """One of the engine's numbers, over the replicas of a role."""
    return sum(values[name] for values in server.gauges().values() if f"role:role={role}" in values)


@pytest.mark.long
@pytest.mark.parametrize("victim", ["rank", "replica"])
def test_a_prefill_side_that_is_killed_costs_time_only(server: Server, victim: str) -> None:
    """Rank or replica, in the middle of a prompt; it is there again later, and is used."""
    prompt, found = f"{victim}: {STORY} {STORY}", []
    before = server.gauge("handoff_received")
    asking = threading.Thread(target=lambda: found.append(ask(server, prompt)))
    known = {process.pid for process in server.ranks()}
    asking.start()
    wait_until(lambda: server.gauge("handoff_reserved") > 0, 30, lambda: str(server.gauges()))
    (replica(server, "Prefill") if victim == "replica" else prefill_rank(server)).send_signal(signal.SIGKILL)
    asking.join(60)
    again = ask(server, prompt)
    assert found == [again]

    def handed() -> bool:
        ask(server, f"{len(found)}, {victim} again: {STORY}")
        found.append({})
        return server.gauge("handoff_received") > before

    wait_until(handed, 120, lambda: f"no hand-off since: {server.gauges()}, ranks before: {known}")


def prefill_rank(server: Server) -> psutil.Process:
    """A rank that is connected to the prefill replica's engine."""
    engine = replica(server, "Prefill")
    ports = {each.laddr.port for each in engine.net_connections() if each.status == "LISTEN"}
    return next(
        rank
        for rank in server.ranks()
        if any(each.raddr and each.raddr.port in ports for each in rank.net_connections() if each.status == "ESTABLISHED")
    )


@pytest.mark.long
def test_replicas_change_their_roles_while_they_serve(server: Server, mine: dict[str, str]) -> None:
    """One becomes mixed at once; another has a stream to finish before it takes prompts, and takes them with new ranks, too."""
    roles = {name: role for name, values in server.gauges().items() for role in ROLES if f"role:role={role}" in values}
    names = {role: name for name, role in roles.items()}
    mixed = run("role", names["prefill"], "mixed", env=mine)
    assert (mixed.returncode, mixed.stdout) == (0, f"replica {names['prefill']} is mixed\n"), mixed.stderr
    stream = Stream(server.url, body([1, 2, 3], 8000)).wait_for(1)  # by the one that has nothing to do
    busy = next(name for name, values in server.gauges().items() if values["running"])
    free = next(name for name in roles if name != busy)
    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(run, "role", busy, "prefill", env=mine)
        wait_until(lambda: server.gauges()[busy]["role_changing"], 90, lambda: str(server.gauges()))
        assert not stream.ended
        assert len(ask(server, STORY)["tokens"]) == 8  # by the other
        stream.leave()
        changed = changing.result()
    assert (changed.returncode, changed.stdout) == (0, f"replica {busy} is prefill\n"), changed.stderr
    assert f"replica {busy} finishes 1 request" in changed.stderr
    told = json.loads(run("status", "--json", env=mine).stdout)
    found = {each["id"]: each for deployment in told["deployments"] for each in deployment["replicas"]}
    assert found[busy]["role"] == "prefill"
    assert found[free]["role"] == ("decode" if roles[free] == "decode" else "mixed")
    before = server.gauges()[busy]["tokens_run"]
    os.kill(found[busy]["ranks"][0]["pid"], signal.SIGKILL)
    wait_until(lambda: server.gauges()[busy]["tokens_run"] < before, 90, lambda: str(server.gauges()))  # ranks made anew

    def handed() -> bool:
        """So many at once that it pays."""
        salt = secrets.token_hex(4)
        answers = [Stream(server.url, body([5 + number] * 40, 8, cache_salt=salt)) for number in range(6)]
        assert all(len(stream.finish().tokens) == 8 for stream in answers)
        return server.gauges()[busy]["handoff_sent"] > 0

    wait_until(handed, 60, lambda: str(server.gauges()))
    assert "role:role=prefill" in server.gauges()[busy]
    wait_until(lambda: server.health() == 200, 30, lambda: server.client.get("/health").text)
