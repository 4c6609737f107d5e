"""No engine replica runs, and none comes soon: requests wait for a while, then they are refused."""

from __future__ import annotations

import signal
import time

import httpx
import pytest

from tests.ray.server import serving, wait_until
from tests.ray.streaming import body
from tests.support.models.tiny_models import tiny

pytestmark = pytest.mark.long

WAIT_S = 3.0
LATE_S = 3.0
QUESTION = body([5, 9, 42], 8)


def test_requests_wait_for_a_replica_only_so_long() -> None:
    """Serve's controller is held still, so that it does not replace the replica."""
    with serving(str(tiny("llama3").folder), "--dtype", "float32", "--replica-wait", str(WAIT_S)) as server:
        before = server.post("/v1/completions", QUESTION)["choices"][0]["token_ids"]
        [controller] = server.named("ray::ServeController")
        [engine] = server.named("ray::ServeReplica:shardwright:Engine")
        controller.send_signal(signal.SIGSTOP)
        try:
            engine.kill()
            engine.wait(10)
            for stream in (False, True):
                began = time.monotonic()
                refused = server.client.post("/v1/completions", json=QUESTION | {"stream": stream})
                assert WAIT_S - 0.1 < time.monotonic() - began < WAIT_S + LATE_S
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "engine_down"
                assert int(refused.headers["retry-after"]) >= 1
            began = time.monotonic()
            late = server.client.post("/v1/completions", json=QUESTION, headers={"x-request-timeout-seconds": "1"})
            assert time.monotonic() - began < 1 + LATE_S
            assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
            with pytest.raises(httpx.ReadTimeout):
                server.client.post("/v1/completions", json=QUESTION, timeout=0.5)
        finally:
            controller.send_signal(signal.SIGCONT)
        wait_until(lambda: server.health() == 200, 90, lambda: server.client.get("/health").text)
        assert server.gauge("finished") + server.gauge("aborts") == 0, "a request that nobody waits for was run"
        assert server.post("/v1/completions", QUESTION)["choices"][0]["token_ids"] == before
        assert server.gauge("finished") == 1
