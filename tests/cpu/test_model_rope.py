"""Rotary frequencies are bit-equal to those of transformers, in every kind and with every option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from actors.model.rope import Rope, inverse_frequencies
from placement.model_spec import RopeSpec

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


def test_a_rotation_keeps_the_dtype_and_turns_in_fp32() -> None:
    x = torch.randn(5, 2, 64)
    rotate = Rope(RopeSpec(), 64).at(torch.arange(1000, 1005))
    half = rotate(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, rotate(x.bfloat16().float()).bfloat16())


def test_stretching_without_the_trained_length_is_refused() -> None:
    with pytest.raises(ValueError, match="original_max_position"):
        inverse_frequencies(RopeSpec(kind="yarn", factor=2.0), 64)
