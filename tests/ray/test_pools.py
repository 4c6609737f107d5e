"""Prefill and decode pools over HTTP, with SmolLM2: KV goes from process to process over NIXL."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import httpx
import psutil
import pytest

from actors.transfer.nixl_transport import is_installed
from tests.ray.server import Server, serving, wait_until

pytestmark = pytest.mark.skipif(not is_installed(), reason="NIXL is not installed: pip install 'shardwright[pools]'")

PAIRS = [
    ("tp=2", "pp=2"),
    ("pp=2", "tp=3"),
    pytest.param("cp=2", "tp=2", marks=pytest.mark.long),
    ("tp=3", "cp=2"),
    pytest.param("attn_dp=2", "tp=2,tp_shares=2/1", marks=pytest.mark.long),
    ("*2", "pp=3,stage_layers=12/9/9"),
]
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
    with serving("--dtype", "float32") as server:
        return [ask(server, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_tokens_equal_those_of_one_rank(expected: list[dict[str, object]], prefill: str, decode: str) -> None:
    with serving("--prefill", prefill, "--decode", decode, "--dtype", "float32", "--threads", "1") as server:
        assert [ask(server, prompt) for prompt in PROMPTS] == expected
        handed = sum(found["prompt_tokens"] for found in expected[:2])  # the third is short
        wait_until(lambda: server.gauge("handoff_sent") == 2, 10, lambda: str(server.gauges()))
        assert (server.gauge("handoff_received"), server.gauge("handoff_fallen_back")) == (2, 0)
        assert server.gauge("handoff_sent_bytes") == handed * KV_BYTES


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--prefill", "tp=2", "--decode", "tp=1", "--dtype", "float32", "--threads", "1") as server:
        yield server


def replica(server: Server, name: str) -> psutil.Process:
    [found] = server.named(f"ray::ServeReplica:shardwright:{name}")
    return found


def held_blocks(server: Server) -> float:
    return sum(server.gauge(name) * sign for name, sign in (("total_blocks", 1), ("free_blocks", -1), ("cached_blocks", -1)))


def test_the_client_of_a_prompt_that_is_being_computed_leaves(server: Server) -> None:
    wait_until(lambda: held_blocks(server) == 0, 30, lambda: str(server.gauges()))
    before = server.gauge("handoff_reservations")
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "Gone. " + STORY * 3, "max_tokens": 50}, timeout=0.3)
    wait_until(lambda: server.gauge("handoff_reservations") > before, 30, lambda: str(server.gauges()))
    wait_until(lambda: held_blocks(server) == 0, 30, lambda: str(server.gauges()))
    assert server.gauge("handoff_outlived") == 0


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
