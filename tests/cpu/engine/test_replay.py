"""A request that continues elsewhere, behind the tokens that a lost replica generated, ends as if nothing had happened."""

from __future__ import annotations

import random

import pytest

from actors.engine.config.engine_config import EngineConfig
from actors.wire.requests import GenerateRequest, TokenEvent
from placement.layout.layout import Layout
from tests.support.inprocess import in_process
from tests.support.long_cases import long
from tests.support.models.tiny_models import tiny
from tests.support.random_requests import random_requests

CONFIG = EngineConfig(block_size=4, num_blocks=400, max_model_len=96, max_batch_tokens=64, max_sequences=16)
LAYOUTS = ["tp=2,pp=2", *long("", "attn_dp=2,tp=2", "cp=2,tp=2", "tp=4,dcp=2")]


def work() -> list[GenerateRequest]:
    """Requests as in a mixed load, some with penalties that count what was generated, and with scores of the prompt."""
    draw = random.Random(6)
    penalties = {"presence_penalty": (0.0, 0.6), "frequency_penalty": (0.0, 0.4), "prompt_logprobs": (None, 1)}
    return [
        request.model_copy(
            update={
                "max_tokens": request.max_tokens + 1,
                "sampling": request.sampling.model_copy(
                    update={name: draw.choice(values) for name, values in penalties.items()}
                ),
            }
        )
        for request in random_requests(40, seed=5)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_rest_is_the_same_wherever_it_is_cut(layout: str) -> None:
    draw, model, requests = random.Random(layout), tiny("llama3"), work()
    with in_process(model, "", CONFIG) as first:
        whole = [first.run(request) for request in requests]
    cuts = [draw.randrange(len(event.tokens)) for event in whole]
    assert sum(cut > 0 for cut in cuts) > len(cuts) / 2
    owners = Layout.parse(layout).kv_owners
    with in_process(model, layout, CONFIG.model_copy(update={"kv_owners": owners})) as second:
        waiting = [
            second.submit(request.model_copy(update={"generated": event.tokens[:cut]}))
            for request, event, cut in zip(requests, whole, cuts, strict=True)
        ]
        rests = [second.finish(events) for events in waiting]
    for request, before, after, cut in zip(requests, whole, rests, cuts, strict=True):
        check_rest(request, before, after, cut)


def check_rest(request: GenerateRequest, whole: TokenEvent, rest: TokenEvent, cut: int) -> None:
    """`rest` is what follows the first `cut` tokens of `whole`; log-probabilities are equal within rounding."""
    assert (rest.tokens, rest.finish) == (whole.tokens[cut:], whole.finish), request
    assert rest.stop_token == whole.stop_token
    assert len(rest.logprobs) == len(rest.tokens)
    for found, expected in zip(rest.logprobs, whole.logprobs[cut:], strict=True):
        assert abs(found.logprob - expected.logprob) < 1e-4, request
    asked = request.sampling.prompt_logprobs is not None
    assert (rest.prompt_logprobs is not None) == (asked and cut == 0), "the scores of the prompt are sent once"
