"""Ropes that depend on the length of a sequence: one answer, whatever runs beside it; where transformers has one, its own."""

from __future__ import annotations

import pytest
import torch

from actors.engine.config.engine_config import EngineConfig
from actors.wire.requests import GenerateRequest, SamplingParams
from tests.support.inprocess import in_process
from tests.support.models.tiny_models import TinyModel, tiny

torch.set_num_threads(1)

TOKENS = [1 + 7 * at % 100 for at in range(60)]
PROMPTS = {"stays short": 12, "grows over": 26, "at the edge": 32, "long": 33, "longer": 48}
"""Tokens of prompts that begin alike; both models were trained on 32."""
GENERATED = 14


def request(length: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"{length}", prompt=TOKENS[:length], max_tokens=GENERATED, sampling=SamplingParams(temperature=0.0)
    )


def expected(model: TinyModel, length: int) -> list[int]:
    """Greedy tokens of one prompt, run in one piece and alone.

    A sequence that grows over the trained length is long from the start under longrope; transformers changes its keys then.
    """
    if model.spec.rope.kind == "longrope" and length <= 32 < length + GENERATED:
        return in_long_terms(model, length)
    with torch.inference_mode():
        model.forget_lengths()
        prompt = torch.tensor([TOKENS[:length]])
        found = model.reference.generate(prompt, max_new_tokens=GENERATED, do_sample=False, eos_token_id=None, pad_token_id=0)
    return found[0, length:].tolist()


def in_long_terms(model: TinyModel, length: int) -> list[int]:
    """Greedy tokens of a sequence that is long from its first token on: transformers is shown it with a tail, which makes it
    long, and which no token sees."""
    tokens = TOKENS[:length]
    while len(tokens) < length + GENERATED:
        padded = tokens + [1] * (64 - len(tokens))
        tokens.append(int(model.logits(padded)[len(tokens) - 1].argmax()))
    return tokens[length:]


@pytest.mark.parametrize("layout", ["", "tp=2,pp=2"])
@pytest.mark.parametrize("family", ["phi3", "llama_dynamic"])
def test_neighbours_chunks_and_cached_prefixes_do_not_matter(family: str, layout: str) -> None:
    model = tiny(family)
    config = EngineConfig(
        block_size=4, num_blocks=200, max_model_len=96, max_chunk_tokens=7, max_sequences=8, rope=model.spec.rope
    )
    oracle = {length: expected(model, length) for length in PROMPTS.values()}
    with in_process(model, layout, config) as replica:
        for _ in range(2):  # the second time all prompts are cached, each by those it may share with
            waiting = {length: replica.submit(request(length)) for length in PROMPTS.values()}
            assert {length: replica.finish(events).tokens for length, events in waiting.items()} == oracle
        assert replica.run(request(12)).cached_tokens == 8
        assert replica.run(request(48)).cached_tokens == 44


def test_keys_of_unlike_lengths_are_told_apart() -> None:
    """Without the model's rope the engine shares them, and the answer is another: what the test above would see."""
    model = tiny("phi3")
    config = EngineConfig(block_size=4, num_blocks=200, max_model_len=96, rope=model.spec.rope)
    with in_process(model, "", config) as replica:
        replica.run(request(12))
        assert replica.run(request(48)).cached_tokens == 0
    with in_process(model, "", config.model_copy(update={"rope": tiny("llama2").spec.rope})) as replica:
        replica.run(request(12))
        assert replica.run(request(48)).cached_tokens == 12
