"""The supported architectures (``model_type``): their defaults for fields absent from config.json, and the form of their
checkpoints.

The defaults are those of the architecture's config class in transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""The fields of config.json that every architecture has: sizes, and numbers of layers and of query heads."""


@dataclass(frozen=True)
class Family:
    """One ``model_type``. Fields that `ModelSpec` also has mean the same there."""

    sizes: Mapping[str, int]
    """Defaults of the fields in `SIZES`, by their names in config.json."""
    max_position: int
    num_kv_heads: int | None
    """Default number of KV heads. None: as many as query heads."""
    head_dim: int | None = None
    """Default size of a head. None: ``hidden_size / num_attention_heads``."""
    attention_bias: bool = False
    """Default of the field that `bias_field` names."""
    bias_field: str = "attention_bias"
    qkv_bias: bool | None = None
    """Whether the q, k and v projections have biases. None: the field that `bias_field` names decides."""
    o_bias: bool | None = False
    mlp_bias: bool | None = False
    """Whether the MLP has biases. None: the field ``mlp_bias`` decides."""
    qk_norm: str = "none"
    """Normalisation of queries and keys. ``optional``: per head if the field ``use_qk_norm`` is true."""
    moe: str | None = None
    """The MoE format of the family's config; see `placement.checkpoint.hf.moe`."""
    sinks: str = "none"
    hybrid: bool = False
    """Whether sliding-window layers may have their own number of KV heads, and values a size of their own; see
    `placement.checkpoint.hf.heads`."""
    mtp_layers: int = 0
    """Default of ``num_nextn_predict_layers``."""
    mla: bool = False
    """Whether the family uses multi-head latent attention (MLA); see `placement.checkpoint.hf.mla`."""
    norm_eps: float = 1e-6
    norms: str = "pre"
    gemma: bool = False
    """Whether the family follows Gemma: norm weights around 0, embeddings times ``sqrt(hidden_size)``, and the scale of the
    scores and the caps in the file."""
    caps: tuple[float | None, float | None] = (None, None)
    """Default soft caps of the attention scores and of the logits."""
    activation: str = "silu"
    fused_qkv: bool = False
    fused_gate_up: bool = False
    tied: bool = False
    windows: str = "none"
    """The rule for which layers have a sliding window; see `placement.checkpoint.hf.windows`."""
    window: int | None = None
    """Default of ``sliding_window``."""
    window_pattern: int = 1
    """Interval of the full-attention layers: those whose number, counted from 1, is a multiple of it."""
    theta: float = 10000.0
    rope: tuple[tuple[str, Any], ...] = ()
    """Default of ``rope_parameters``."""
    local_theta: float | None = None
    """RoPE base of the sliding-window layers, if it differs."""
    partial_rotary_factor: float | None = None
    """Default of the field of the same name. None: heads are always rotated whole."""
    interleaved: bool | None = False
    """Whether RoPE pairs neighbouring dimensions. None: the field ``rope_interleave`` decides."""
    original_max_position: int | None = None
    """Default of ``original_max_position_embeddings``. None: the value of ``max_position_embeddings``."""
    rope_aliases: tuple[str, ...] = ()
    """Names of ``longrope`` in old files."""
    no_rope_interval: int | None = None
    """Default of ``no_rope_layer_interval``. None: all layers have RoPE."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


def _sizes(*values: int) -> dict[str, int]:
    """Returns `values` by the names in `SIZES`, in their order."""
    return dict(zip(SIZES, values, strict=True))


_GLM = {
    "sizes": _sizes(4096, 13696, 40, 32, 151552),
    "max_position": 131072,
    "num_kv_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
    "norm_eps": 1.5625e-7,
    "fused_gate_up": True,
    "partial_rotary_factor": 0.5,
    "interleaved": True,
    "eos_token_ids": (151329, 151336, 151338),
}

FAMILIES = {
    "llama": Family(
        _sizes(4096, 11008, 32, 32, 32000), 2048, None, o_bias=None, mlp_bias=None, bos_token_id=1, eos_token_ids=(2,)
    ),
    "mistral": Family(
        _sizes(4096, 14336, 32, 32, 32000),
        131072,
        8,
        qkv_bias=False,
        windows="all",
        window=4096,
        bos_token_id=1,
        eos_token_ids=(2,),
    ),
    "qwen2": Family(_sizes(4096, 22016, 32, 32, 151936), 32768, 32, qkv_bias=True, windows="qwen", window=4096),
    "qwen3": Family(
        _sizes(4096, 22016, 32, 32, 151936), 32768, 32, head_dim=128, o_bias=None, qk_norm="head", windows="qwen", window=4096
    ),
    "mixtral": Family(
        _sizes(4096, 14336, 32, 32, 32000),
        131072,
        8,
        qkv_bias=False,
        moe="mixtral",
        norm_eps=1e-5,
        windows="all",
        theta=1e6,
        bos_token_id=1,
        eos_token_ids=(2,),
    ),
    "qwen2_moe": Family(
        _sizes(2048, 5632, 24, 16, 151936),
        32768,
        16,
        attention_bias=True,
        bias_field="qkv_bias",
        moe="qwen2",
        windows="qwen2_moe",
        window=4096,
    ),
    "qwen3_moe": Family(
        _sizes(2048, 6144, 24, 32, 151936), 32768, 4, o_bias=None, qk_norm="head", moe="qwen3", windows="if_told", window=4096
    ),
    "gpt_oss": Family(
        _sizes(2880, 2880, 36, 64, 201088),
        131072,
        8,
        head_dim=64,
        attention_bias=True,
        o_bias=None,
        moe="gpt_oss",
        sinks="all",
        norm_eps=1e-5,
        windows="alternating",
        window=128,
        theta=150000.0,
        rope=(("rope_type", "yarn"), ("factor", 32.0), ("truncate", False), ("original_max_position_embeddings", 4096)),
    ),
    "glm4_moe": Family(
        _sizes(4096, 10944, 46, 96, 151552),
        131072,
        8,
        moe="glm4",
        qk_norm="optional",
        norm_eps=1e-5,
        mtp_layers=1,
        partial_rotary_factor=0.5,
    ),
    "mimo_v2_flash": Family(
        _sizes(4096, 16384, 48, 64, 152576),
        131072,
        4,
        head_dim=192,
        moe="mimo",
        hybrid=True,
        mtp_layers=3,
        norm_eps=1e-5,
        windows="hybrid",
        window=129,
        theta=5e6,
        local_theta=1e4,
        partial_rotary_factor=0.334,
        bos_token_id=1,
    ),
    "deepseek_v2": Family(
        _sizes(4096, 11008, 32, 32, 102400),
        2048,
        None,
        o_bias=None,
        mlp_bias=None,
        moe="deepseek_v2",
        mla=True,
        interleaved=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    ),
    "deepseek_v3": Family(
        _sizes(7168, 18432, 61, 128, 129280),
        4096,
        None,
        o_bias=None,
        moe="deepseek_v3",
        mla=True,
        mtp_layers=1,
        interleaved=None,
        bos_token_id=0,
        eos_token_ids=(1,),
    ),
    "smollm3": Family(
        _sizes(2048, 11008, 36, 16, 128256),
        32768,
        4,
        o_bias=None,
        mlp_bias=None,
        tied=True,
        windows="smollm3",
        theta=2e6,
        no_rope_interval=4,
        bos_token_id=128000,
        eos_token_ids=(128001,),
    ),
    "olmo2": Family(
        _sizes(4096, 11008, 32, 32, 50304),
        2048,
        None,
        o_bias=None,
        qk_norm="width",
        norm_eps=1e-5,
        norms="post",
        eos_token_ids=(50279,),
    ),
    "phi3": Family(
        _sizes(3072, 8192, 32, 32, 32064),
        4096,
        None,
        qkv_bias=False,
        norm_eps=1e-5,
        fused_qkv=True,
        fused_gate_up=True,
        windows="all",
        partial_rotary_factor=1.0,
        original_max_position=4096,
        rope_aliases=("su", "yarn"),
        bos_token_id=1,
        eos_token_ids=(32000,),
    ),
    "glm": Family(**_GLM),  # type: ignore[arg-type]
    "glm4": Family(**_GLM, norms="sandwich_glm"),  # type: ignore[arg-type]
    "gemma2": Family(
        _sizes(2304, 9216, 26, 8, 256000),
        8192,
        4,
        head_dim=256,
        o_bias=None,
        norms="sandwich",
        gemma=True,
        caps=(50.0, 30.0),
        activation="gelu_pytorch_tanh",
        tied=True,
        windows="pattern",
        window=4096,
        window_pattern=2,
        bos_token_id=2,
        eos_token_ids=(1,),
    ),
    "gemma3_text": Family(
        _sizes(2304, 9216, 26, 8, 262208),
        131072,
        4,
        head_dim=256,
        o_bias=None,
        qk_norm="head",
        norms="sandwich",
        gemma=True,
        activation="gelu_pytorch_tanh",
        tied=True,
        windows="pattern",
        window=4096,
        window_pattern=6,
        theta=1e6,
        local_theta=1e4,
        bos_token_id=2,
        eos_token_ids=(1,),
    ),
}
"""The supported families by ``model_type``."""

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Names of the activations in `ModelSpec`, by their names in config.json."""

_TEXT_FAMILIES = {
    "deepseek_v3": ("kimi_k25",),
    "gemma3_text": ("gemma3", "shieldgemma2"),
    "llama": (
        *("deepseek_vl", "deepseek_vl_hybrid", "glmasr", "idefics3", "janus", "llava", "llava_next", "llava_next_video"),
        *("omniasr", "perception_lm", "smolvlm", "video_llava", "vipllava", "voxtral"),
    ),
    "mistral": ("idefics2", "mistral3"),
    "qwen2": (
        *("audioflamingo3", "fast_vlm", "got_ocr2", "internvl", "llava_onevision", "musicflamingo", "ovis2", "pp_chart2table"),
        *("qwen2_audio", "vibevoice", "vibevoice_asr", "video_llama_3"),
    ),
    "qwen3": ("lighton_ocr", "moss_transcribe_diarize", "qianfan_ocr", "qwen3_asr"),
}

TEXT_FAMILY = {outer: family for family, outers in _TEXT_FAMILIES.items() for outer in outers}
"""The family of the decoder in a multimodal model, by the outer ``model_type``: counts if ``text_config`` names none."""
