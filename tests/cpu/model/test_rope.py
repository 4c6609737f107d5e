"""Rotary frequencies are bit-equal to those of transformers, in every kind and with every option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Glm4Config, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm4 import modeling_glm4
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from actors.model.step.rope import LengthRope, Rope, make_rope
from actors.model.step.rope_frequencies import dynamic_frequencies, inverse_frequencies, long_frequencies
from placement.model.spec import RopeSpec
from tests.support.models.tiny_decoder import batch_of

NAMES = {"original_max_position": "original_max_position_embeddings", "theta": "rope_theta", "kind": "rope_type"}

CASES: list[dict[str, Any]] = [
    {"kind": "default", "theta": 500000.0},
    {"kind": "linear", "factor": 4.0},
    {"kind": "llama3", "factor": 8.0, "original_max_position": 8192, "theta": 500000.0},
    {"kind": "llama3", "factor": 32.0, "original_max_position": 32, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"kind": "yarn", "factor": 4.0, "original_max_position": 32},
    {"kind": "yarn", "factor": 4.0, "original_max_position": 32768, "theta": 1000000.0},
    {"kind": "yarn", "factor": 4.0, "original_max_position": 4096, "attention_factor": 1.25},
    {"kind": "yarn", "factor": 40.0, "original_max_position": 4096, "mscale": 1.0, "mscale_all_dim": 0.707},
    {"kind": "yarn", "factor": 40.0, "original_max_position": 4096, "mscale": 0.9},
    {"kind": "yarn", "factor": 8.0, "original_max_position": 4096, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    {"kind": "yarn", "factor": 1.0, "original_max_position": 4096},
]


def config_of(case: dict[str, Any], head_dim: int) -> LlamaConfig:
    fields = RopeSpec(**case).model_dump(exclude_none=True)
    parameters = {NAMES.get(name, name): value for name, value in fields.items()}
    sizes = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "head_dim": head_dim}
    return LlamaConfig(**sizes, max_position_embeddings=65536, rope_parameters=parameters)


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_frequencies_and_attention_factor(case: dict[str, Any], head_dim: int) -> None:
    config = config_of(case, head_dim)
    if case["kind"] == "default":
        expected, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[case["kind"]](config)
    ours, our_factor = inverse_frequencies(RopeSpec(**case), head_dim)
    assert torch.equal(ours, expected)
    assert our_factor == factor


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rotation_equals_transformers(case: dict[str, Any]) -> None:
    positions = torch.tensor([0, 1, 31, 32, 33, 4097, 60000])
    x = torch.randn(7, 3, 64)
    cos, sin = LlamaRotaryEmbedding(config_of(case, 64))(x, positions[None])
    expected = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)[0][0].transpose(0, 1)
    torch.testing.assert_close(Rope(RopeSpec(**case), 64).at(positions)(x), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("rotary_dims", [8, 12, 16])
def test_neighbours_are_rotated_together_and_in_part(rotary_dims: int) -> None:
    parameters = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": rotary_dims / 16}
    config = Glm4Config(hidden_size=64, num_attention_heads=4, head_dim=16, rope_parameters=parameters)
    positions, x = torch.tensor([0, 1, 31, 4097]), torch.randn(4, 3, 16)
    cos, sin = modeling_glm4.Glm4RotaryEmbedding(config)(x, positions[None])
    heads = x.transpose(0, 1)[None]
    expected = modeling_glm4.apply_rotary_pos_emb(heads, heads, cos, sin)[0][0].transpose(0, 1)
    spec = RopeSpec(theta=100.0, rotary_dims=rotary_dims, interleaved=True)
    torch.testing.assert_close(Rope(spec, 16).at(positions)(x), expected, atol=1e-6, rtol=1e-6)


LONG = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 32}


@pytest.mark.parametrize("given", [{"factor": 8.0}, {"factor": 0.5}, {"factor": 8.0, "attention_factor": 1.25}], ids=str)
def test_both_sets_of_frequencies_of_longrope(given: dict[str, float]) -> None:
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "longrope", **LONG, **given},
    )
    spec = RopeSpec(
        kind="longrope",
        original_max_position=32,
        short_factor=tuple(LONG["short_factor"]),
        long_factor=tuple(LONG["long_factor"]),
        **given,
    )
    short, factor = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=32)
    long, _ = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=33)
    ours, our_factor = inverse_frequencies(spec, 8)
    assert torch.equal(ours, short)
    assert torch.equal(long_frequencies(spec, 8), long)
    assert our_factor == factor
    assert [spec.length_class(length) for length in (1, 32, 33, 200)] == [0, 0, 1, 1]


def test_dynamic_frequencies_of_every_length() -> None:
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=32,
        rope_parameters={"rope_type": "dynamic", "factor": 3.0},
    )
    spec = RopeSpec(kind="dynamic", factor=3.0, original_max_position=32)
    lengths = torch.tensor([1, 32, 33, 50, 96])
    ours = dynamic_frequencies(spec, 8, lengths)
    for length, row in zip(lengths, ours, strict=True):
        torch.testing.assert_close(row, ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=length)[0], atol=0, rtol=1e-6)
    assert torch.equal(ours[0], ours[1])
    assert torch.equal(ours[1], inverse_frequencies(spec, 8)[0])
    assert [spec.length_class(length) for length in (1, 32, 33, 50)] == [0, 0, 33, 50]


def test_layers_without_rope_are_left_alone() -> None:
    x = torch.randn(3, 2, 8)
    batch = batch_of([(0, 4, 3)], [[0] * 7], [[0, 1]], 4)
    assert make_rope(None, 8).of(batch)(x) is x
    assert not isinstance(make_rope(RopeSpec(), 8), LengthRope)


def test_a_rotation_keeps_the_dtype_and_is_done_in_fp32() -> None:
    x = torch.randn(5, 2, 64)
    rotate = Rope(RopeSpec(), 64).at(torch.arange(1000, 1005))
    half = rotate(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, rotate(x.bfloat16().float()).bfloat16())


def test_stretching_without_the_trained_length_is_refused() -> None:
    with pytest.raises(ValueError, match="original_max_position"):
        RopeSpec(kind="dynamic", factor=2.0)
    with pytest.raises(ValueError, match="original_max_position"):
        inverse_frequencies(RopeSpec(kind="yarn", factor=2.0), 64)
