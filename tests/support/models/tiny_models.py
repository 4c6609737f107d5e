"""Tiny random models of every supported family, made by transformers, which is also the oracle for what they compute.

Weights are drawn wide enough that attention, biases and norms all matter to the logits; everything is fp32.
"""

from __future__ import annotations

import atexit
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from placement.checkpoint import header
from placement.model.spec import ModelSpec

_SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "longrope_24": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1 + at / 32 for at in range(24)],
        "long_factor": [1 + at / 4 for at in range(24)],
        "partial_rotary_factor": 0.75,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
}

LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.3],
        "long_factor": [1.5, 3.0, 8.0],
        "partial_rotary_factor": 0.75,
    },
}
"""Long from 33 tokens on; 3 of 4 pairs of a head of 8 are rotated."""

_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

_EXPERTS = {"moe_intermediate_size": 28, "num_experts_per_tok": 2}
"""No tp size divides the columns."""
_DEEP_EXPERTS = {
    **_EXPERTS,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
"""One dense layer, then groups of experts and shared ones."""

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 4,
    "num_experts_per_tok": 2,
}
"""Thirteen tokens behind a long context are where the naive form begins."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama"},
    "llama3": {"model_type": "llama", "rope_parameters": ROPES["llama3"]},
    "llama_biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": 8, "head_dim": 12},
    "qwen2": {"model_type": "qwen2"},
    "qwen2_windows": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "qwen2_alternating": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 12},
    "llama_dynamic": {"model_type": "llama", "max_position_embeddings": 32, "rope_parameters": ROPES["dynamic"]},
    "smollm3": {"model_type": "smollm3", **_IDS, "no_rope_layer_interval": 2},
    "olmo2": {"model_type": "olmo2", **_IDS},
    "phi3": {"model_type": "phi3", **_IDS, "sliding_window": 8, **LONGROPE},
    "glm": {"model_type": "glm", **_IDS, "head_dim": 12, "partial_rotary_factor": 0.5},
    "glm4": {"model_type": "glm4", **_IDS, "head_dim": 12, "partial_rotary_factor": 0.5},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 12,
        "sliding_window": 8,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 12,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 20,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 36},
    "mixtral_one": {"model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 36, "num_experts_per_tok": 1},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **_EXPERTS,
        "num_experts": 6,
        "shared_expert_intermediate_size": 20,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_EXPERTS,
        "num_experts": 5,
        "head_dim": 12,
        "decoder_sparse_step": 2,
        "norm_topk_prob": True,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "intermediate_size": 28,
        "head_dim": 12,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "swiglu_limit": 1.5,
        "rope_parameters": {**ROPES["yarn"], "truncate": False},
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        **_EXPERTS,
        "head_dim": 12,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
        "attention_bias": True,
        "use_qk_norm": True,
    },
    "mimo_v2": {
        "model_type": "mimo_v2_flash",
        **_EXPERTS,
        "num_attention_heads": 12,
        "head_dim": 12,
        "v_head_dim": 8,
        "sliding_window": 8,
        "attention_value_scale": 0.6,
        "attention_bias": True,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.8,
    },
    "deepseek_v2": {"model_type": "deepseek_v2", **_LATENT, "q_lora_rank": None},
    "deepseek_v3": {"model_type": "deepseek_v3", **_LATENT, "q_lora_rank": 20, "rope_parameters": ROPES["yarn_mscale"]},
    "deepseek_v2_moe": {
        "model_type": "deepseek_v2",
        **_LATENT,
        **_DEEP_EXPERTS,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.3,
    },
    "deepseek_v3_moe": {
        "model_type": "deepseek_v3",
        **_LATENT,
        **_DEEP_EXPERTS,
        "q_lora_rank": 20,
        "rope_parameters": ROPES["yarn_mscale"],
        "routed_scaling_factor": 1.8,
    },
}
"""What each variant adds to the common sizes."""


@dataclass(frozen=True)
class SavedModel:
    """A model in `folder` (or in one GGUF file), and its spec."""

    folder: Path
    spec: ModelSpec


@dataclass(frozen=True)
class TinyModel(SavedModel):
    """A saved model, and the transformers model itself."""

    reference: PreTrainedModel

    @property
    def state(self) -> dict[str, Tensor]:
        """Weights as they are saved, by their Hugging Face names; of a GGUF file, as the reference was given them."""
        return self.reference.state_dict() if self.folder.is_file() else load_file(self.folder / "model.safetensors")

    def logits(self, tokens: list[int]) -> Tensor:
        """[len(tokens), vocab] fp32, as transformers computes them in one go."""
        with torch.inference_mode():
            self.forget_lengths()
            return self.reference(torch.tensor([tokens])).logits[0]

    def forget_lengths(self) -> None:
        """Have transformers forget the longest sequence it has seen, which else decides the frequencies of a dynamic rope."""
        if self.spec.rope.kind == "dynamic":
            self.reference(torch.tensor([[0]]))


def tiny(family: str, *, tied: bool = False, bias: float = 0.3, rope: str | None = None, **sizes: Any) -> TinyModel:
    """The tiny model of a variant in `FAMILIES`, made once a session.

    `bias` is the scale of every bias; `rope` a key of `ROPES`; `sizes` override fields of the transformers config
    (hashable values only).
    """
    return _made(family, tied, bias, rope, tuple(sorted(sizes.items())))


@cache
def _made(family: str, tied: bool, bias: float, rope: str | None, sizes: tuple[tuple[str, Any], ...]) -> TinyModel:
    own = {name: list(value) if isinstance(value, tuple) else value for name, value in sizes}
    fields = {**_SIZES, **FAMILIES[family], "tie_word_embeddings": tied, **own}
    if rope is not None:
        fields["rope_parameters"] = ROPES[rope]
    torch.manual_seed(1)
    config = AutoConfig.for_model(**fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    _draw_weights(model, bias)
    folder = Path(_session_folder()) / f"model{_made.cache_info().currsize}"
    model.save_pretrained(folder)
    return TinyModel(folder, header.read(folder), model)


def _draw_weights(model: PreTrainedModel, bias: float) -> None:
    with torch.no_grad():
        choices = ((name, x) for name, x in model.named_buffers() if name.endswith("e_score_correction_bias"))
        for name, weight in (*model.named_parameters(), *choices):
            if name.endswith(("bias", "sinks")):
                weight.normal_().mul_(bias)
            elif weight.dim() == 1:
                weight.normal_().mul_(0.2).add_(1)
            else:
                weight.normal_().mul_(weight.shape[-1] ** -0.5)


@cache
def _session_folder() -> str:
    folder = tempfile.TemporaryDirectory(prefix="tiny-models-")
    atexit.register(folder.cleanup)
    return folder.name
