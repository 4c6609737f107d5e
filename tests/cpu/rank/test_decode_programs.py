"""Recorded decode steps give the bits of steps that are run as usual, under every layout of dense models."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from actors.engine.config.engine_config import EngineConfig
from actors.model.decode_programs import DecodePrograms
from actors.model.kernels.native.library import library
from actors.model.kv.kv_caches import KVCaches
from actors.model.step.batch import Batch
from actors.rank.assembly import Parts
from actors.wire.requests import GenerateRequest, SamplingParams, TokenEvent
from placement.ownership.shards import whole_model
from tests.support.inprocess import in_process, whole_decoder
from tests.support.models.tiny_models import TinyModel, tiny
from tests.support.verifying import random_prompts

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_attention_heads": 4, "vocab_size": 256}
LENGTHS = (5, 40, 1, 17, 3)


@pytest.fixture(autouse=True)
def packed() -> None:
    native = library(torch.zeros(1))
    if native is None or not native.packs:
        pytest.skip("this machine has no kernels for packed bfloat16 weights: a compiler and AVX-512 with bf16 are needed")


def wide(family: str, **sizes: Any) -> TinyModel:
    """A tiny model whose slices are whole blocks of 32, on up to two tp ranks."""
    return tiny(family, **{**SIZES, **sizes})


def generated(model: TinyModel, layout: str) -> list[TokenEvent]:
    """The answers to requests of unlike lengths, all at once, with logprobs."""
    config = EngineConfig(num_blocks=64, block_size=16, max_model_len=128)
    with in_process(model, layout, config, torch.bfloat16) as replica:
        streams = [
            replica.submit(
                GenerateRequest(
                    request_id=str(at),
                    prompt=prompt,
                    max_tokens=9 + 5 * at,
                    sampling=SamplingParams(temperature=0, logprobs=3),
                )
            )
            for at, prompt in enumerate(random_prompts(model, LENGTHS))
        ]
        return [replica.finish(stream) for stream in streams]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the steps that were recorded, run again, and refused."""
    found = Counter[str]()
    run = DecodePrograms.run

    def counted(self: DecodePrograms, *given: Any) -> Any:
        before = list(self._recorded.values())
        out = run(self, *given)
        found[
            "refused"
            if out is None
            else "recorded"
            if any(all(one is not old for old in before) for one in self._recorded.values())
            else "again"
        ] += 1
        return out

    monkeypatch.setattr(DecodePrograms, "run", counted)
    return found


@pytest.mark.parametrize("layout", ["tp=1", "tp=2", "pp=2", "attn_dp=2", "tp=2,pp=2", "tp=2,sp=true"])
@pytest.mark.parametrize("family", ["llama3", "qwen2_windows", "llama_biases", "qwen3", "mistral"])
def test_recorded_steps_give_the_bits_of_usual_ones(
    family: str, layout: str, runs: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wide(family, num_key_value_heads=2)
    recorded = generated(model, layout)
    assert runs["again"] > 2 * runs["recorded"] > 0
    assert not runs["refused"]
    monkeypatch.setattr(DecodePrograms, "takes", lambda *_: False)
    for got, wanted in zip(recorded, generated(model, layout), strict=True):
        assert got.tokens == wanted.tokens
        assert got.logprobs == wanted.logprobs


@pytest.mark.parametrize("family", ["gemma2", "olmo2", "glm4_moe", "deepseek_v3"])
def test_a_model_that_cannot_be_recorded_runs_as_usual(family: str, runs: Counter[str]) -> None:
    assert all(event.finish == "length" for event in generated(tiny(family), "tp=2"))
    assert not runs["again"]
    assert runs["refused"] <= 2, "a rank tries once"


def test_hooks_on_layers_are_called_in_every_step(runs: Counter[str]) -> None:
    calls = []

    def attach(parts: Parts) -> Parts:
        parts.decoder.watch([range(0, 2)], calls.append)
        return parts

    model = wide("llama3", num_key_value_heads=2)
    config = EngineConfig(num_blocks=64, block_size=16, max_model_len=128)
    with in_process(model, "tp=1", config, torch.bfloat16, attach) as replica:
        replica.run(
            GenerateRequest(
                request_id="a",
                prompt=[1, 2, 3],
                max_tokens=6,
            )
        )
    assert len(calls) == 6
    assert not runs


def test_another_cache_gets_programs_of_its_own(runs: Counter[str]) -> None:
    model = wide("llama3", num_key_value_heads=2)
    decoder, own = whole_decoder(model, torch.bfloat16), whole_model(model.spec)

    def step(cache: KVCaches, token: int, position: int) -> torch.Tensor:
        one, at = torch.tensor([token]), torch.tensor([position])
        return decoder(Batch(one, at, at, [1], [position], [[0]], torch.zeros(1, dtype=torch.int64)), None, cache)

    def outputs(tokens: list[int]) -> list[torch.Tensor]:
        cache = KVCaches.of(model.spec, own, 4, 16, torch.bfloat16)
        return [step(cache, token, position) for position, token in enumerate(tokens)]

    first, other = outputs([7, 8, 9]), outputs([17, 18, 19])
    assert runs == Counter(recorded=2, again=4)
    again = outputs([7, 8, 9])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
