"""Two hundred requests at once through the real engine and ranks: lengths, stops, aborts, preemptions, seeds, priorities.

All finish, every block comes back, and what each gets is what it gets when it is alone.
"""

from __future__ import annotations

import random

import pytest

from actors.engine.config.engine_config import EngineConfig
from placement.layout.layout import Layout
from tests.support.inprocess import in_process
from tests.support.long_cases import long
from tests.support.models.tiny_models import tiny
from tests.support.random_requests import random_requests

ROOMY = EngineConfig(block_size=4, num_blocks=400, max_model_len=96, max_batch_tokens=64, max_sequences=16)
CRAMPED = EngineConfig(block_size=4, num_blocks=40, max_model_len=96, max_batch_tokens=64, max_sequences=16)


@pytest.mark.parametrize(
    ("layout", "depth"),
    [
        ("attn_dp=2,tp=2,pp=2", None),
        *long(
            ("pp=2", None),
            ("", 1),
            ("", 4),
            ("pp=3", None),
            ("tp=2,pp=2,sp=true", 5),
            ("cp=2,tp=2", None),
            ("tp=4,dcp=2", None),
            ("attn_dp=3,cp=2", 3),
        ),
    ],
)
def test_mixed_load_equals_one_at_a_time(layout: str, depth: int | None) -> None:
    model = tiny("llama3")
    work = random_requests(60 if "=" in layout else 120, seed=3)
    aborted = {request.request_id for request in random.Random(4).sample(work, 12)}
    owners, dp_size = Layout.parse(layout).kv_owners, Layout.parse(layout).attn_dp
    sizes = {"num_blocks": CRAMPED.num_blocks // owners, "kv_owners": owners}
    config = CRAMPED.model_copy(update={"plans_in_flight": depth, "micro_batch_rows": 2, "micro_batch_tokens": 24, **sizes})
    with in_process(model, layout, config) as replica:
        waiting = [(request, replica.submit(request)) for request in work]
        for request in work:
            if request.request_id in aborted:
                replica.engine.cancel(request.request_id)
        together = {request.request_id: replica.finish(events) for request, events in waiting}
        stats = replica.engine.stats()
    assert stats.preemptions > 0
    assert stats.cache_hit_tokens > 0
    assert (stats.tokens_discarded > 0) == (depth != 1), "what is sampled past a stop is dropped, and only ahead of results"
    assert (stats.running, stats.waiting, stats.free_blocks + stats.cached_blocks) == (0, 0, dp_size * CRAMPED.num_blocks)
    assert {name for name, event in together.items() if event.finish == "abort"} <= aborted
    with in_process(model, "", ROOMY) as alone:
        for request in work:
            expected, found = alone.run(request), together[request.request_id]
            if found.finish == "abort":
                assert found.tokens == expected.tokens[: len(found.tokens)]
            else:
                assert_same(found, expected, request.request_id)


def assert_same(found, expected, name: str) -> None:
    """Equal tokens and reasons; log-probabilities within rounding."""
    assert (found.tokens, found.finish) == (expected.tokens, expected.finish), name
    for a, b in zip(found.logprobs, expected.logprobs, strict=True):
        assert abs(a.logprob - b.logprob) < 1e-4, name
