"""DP ranks without work while others have some: nobody waits for them for ever, and answers are those of one rank."""

from __future__ import annotations

import time
from functools import cache

import pytest

from actors.engine.config.engine_config import EngineConfig
from actors.wire.requests import GenerateRequest, SamplingParams
from tests.support.inprocess import InProcess, in_process
from tests.support.long_cases import long
from tests.support.models.tiny_models import TinyModel, tiny

LAYOUTS = [
    "attn_dp=2,ep=2,dispatch=gather",
    "attn_dp=2,ep=2,dispatch=a2a",
    *long("attn_dp=2,tp=2,ep=2,redundant_experts=3,dispatch=a2a", "attn_dp=2,tp=2,ep=4,pp=2"),
    "attn_dp=2,tp=2,ep=2,pp=2,lm_head=stage",
]
CONFIG = EngineConfig(block_size=4, num_blocks=60, max_model_len=160, max_batch_tokens=32, max_sequences=8)


def model() -> TinyModel:
    """Layers with experts and without."""
    return tiny("qwen2_moe")


def request(name: str, length: int, max_tokens: int) -> GenerateRequest:
    prompt = [(len(name) * 17 + 7 * at) % 90 + 3 for at in range(length)]
    sampling = SamplingParams(temperature=0.0)
    return GenerateRequest(request_id=name, prompt=prompt, max_tokens=max_tokens, sampling=sampling)


WAVES = [
    [request("alone", 9, 12)],
    [request("long one", 60, 70), request("short", 2, 2)],
    [request("b" * at, 5 * at, 3 + at) for at in range(1, 8)],
    [request("after the silence", 6, 10)],
]
"""Each is sent when the one before is answered, and nothing is left to run."""


@cache
def of_one_rank(name: str, length: int, max_tokens: int) -> list[int]:
    """What a request is answered with where nothing is parallel."""
    with in_process(model(), "", CONFIG) as replica:
        return replica.run(request(name, length, max_tokens)).tokens


@pytest.mark.parametrize("layout", LAYOUTS)
def test_idle_dp_ranks_hang_nobody(layout: str) -> None:
    with in_process(model(), layout, CONFIG) as replica:
        for wave in WAVES:
            check_wave(replica, wave)
            wait_for_silence(replica)
        assert replica.engine.healthy() is None
        stats = replica.engine.stats()
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks


def check_wave(replica: InProcess, wave: list[GenerateRequest]) -> None:
    """All are answered, as by one rank."""
    waiting = [(wanted, replica.submit(wanted)) for wanted in wave]
    for wanted, events in waiting:
        found = replica.finish(events)
        assert found.finish == "length"
        assert found.tokens == of_one_rank(wanted.request_id, len(wanted.prompt), wanted.max_tokens)


def wait_for_silence(replica: InProcess) -> None:
    """Until the engine has nothing to do; a DP rank without work is no work."""
    deadline = time.monotonic() + 20
    while (stats := replica.engine.stats()).busy_since is not None:
        assert time.monotonic() < deadline, f"still busy: {stats}"
        time.sleep(0.001)
