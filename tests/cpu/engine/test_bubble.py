"""The measured bubble of a pipeline whose stages take equally long is the one of the formula."""

from __future__ import annotations

import queue
import time

import pytest
import torch

from actors.engine.config.engine_config import EngineConfig
from actors.engine.engine import Engine
from actors.rank.assembly import Parts
from actors.rank.threads import ThreadRanks
from actors.wire.requests import GenerateRequest, SamplingParams, TokenEvent
from placement.cost.balance import bubble
from placement.layout.layout import Layout
from tests.support.inprocess import rank_config
from tests.support.models.tiny_models import tiny

STEP_S = 0.25
"""What a stage takes for a step: far more than the tiny model does."""
CHUNK = 8
WAIT_S = 60.0


def slow(parts: Parts) -> Parts:
    forward = parts.decoder.forward

    def later(*arguments: object) -> torch.Tensor:
        began = time.monotonic()
        hidden = forward(*arguments)
        time.sleep(max(0.0, STEP_S - (time.monotonic() - began)))
        return hidden

    parts.decoder.forward = later
    return parts


def run(engine: Engine, name: str, num_tokens: int) -> None:
    """Run a prompt to its first token. Salted, so that no chunk of it is in the cache."""
    events: queue.Queue[TokenEvent] = queue.Queue()
    request = GenerateRequest(
        request_id=name, prompt=list(range(num_tokens)), max_tokens=1, sampling=SamplingParams(temperature=0), cache_salt=name
    )
    engine.submit(request, events.put)
    assert events.get(timeout=WAIT_S).finish == "length"


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_the_measured_bubble_is_that_of_the_formula(micro_batches: int) -> None:
    config = EngineConfig(
        num_blocks=40, block_size=4, max_model_len=96, max_batch_tokens=64, stages=2, micro_batch_tokens=CHUNK
    )
    ranks = ThreadRanks(rank_config(tiny("llama2"), Layout(pp=2), block_size=4), config.num_blocks, attach=slow)
    engine = Engine(config, ranks)
    engine.start()
    try:
        run(engine, "loads the weights", 1)
        before = engine.stats()
        run(engine, "measured", micro_batches * CHUNK)
        after = engine.stats()
    finally:
        engine.close()
    assert after.steps - before.steps == micro_batches
    busy = after.stage_busy_seconds - before.stage_busy_seconds
    wall = after.pipeline_seconds - before.pipeline_seconds
    assert 1 - busy / (2 * wall) == pytest.approx(bubble(2, micro_batches), abs=0.1)
    assert after.pipeline_bubble is not None
    assert 0 < after.pipeline_bubble < 1
