"""Configs of published models, rebuilt from their cards, with the parameter counts that were published for them.

The counts are those of the safetensors files, for which the hub shows them (a tied embedding counts once), but for two that are
only known as the card rounds them: Qwen2-57B-A14B (57.4B) and MiMo-V2-Flash (309B).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    """One model: the parameters in its files, how many of them are not the text model's, and its config.json."""

    total: int
    config: dict[str, Any]
    others: int = 0

    @property
    def count(self) -> int:
        """Parameters of the text model."""
        return self.total - self.others


def _config(
    kind: str, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any
) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {"model_type": kind, **sizes, "num_key_value_heads": kv_heads, "vocab_size": vocab, **more}


_TIED = {"tie_word_embeddings": True}
_DEEPSEEK = {"n_shared_experts": 2, "first_k_dense_replace": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 1408}
_GPT_OSS = {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "vocab_size": 201088, "head_dim": 64}
_GLM = {"head_dim": 128, "attention_bias": True, "n_shared_experts": 1, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1}


def _multimodal(kind: str, text: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": kind, "text_config": text, "vision_config": {"hidden_size": 1152}, "torch_dtype": "bfloat16"}


_SIGLIP = 416_866_032
"""Parameters of the vision tower of Gemma 3, which has 4,096 positions (PaliGemma's has 256)."""
_CLIP = 303_507_456
"""Parameters of CLIP ViT-L/14 for 336 pixels."""
_WHISPER = 636_968_960
"""Parameters of the encoder of Whisper large-v3."""

PUBLISHED = {
    # llama
    "Llama-2-7b": Published(6_738_415_616, _config("llama", 4096, 11008, 32, 32, 32, 32000)),
    "Llama-2-13b": Published(13_015_864_320, _config("llama", 5120, 13824, 40, 40, 40, 32000)),
    "Llama-3.1-8B": Published(8_030_261_248, _config("llama", 4096, 14336, 32, 32, 8, 128256)),
    "Llama-3.2-1B": Published(1_235_814_400, _config("llama", 2048, 8192, 16, 32, 8, 128256, head_dim=64, **_TIED)),
    "Llama-3.2-3B": Published(3_212_749_824, _config("llama", 3072, 8192, 28, 24, 8, 128256, head_dim=128, **_TIED)),
    "Llama-3.1-405B": Published(405_853_388_800, _config("llama", 16384, 53248, 126, 128, 8, 128256)),
    "TinyLlama-1.1B": Published(1_100_048_384, _config("llama", 2048, 5632, 22, 32, 4, 32000)),
    "Yi-34B": Published(34_388_917_248, _config("llama", 7168, 20480, 60, 56, 8, 64000)),
    "SmolLM2-1.7B": Published(1_711_376_384, _config("llama", 2048, 8192, 24, 32, 32, 49152, **_TIED)),
    "deepseek-coder-33b": Published(33_342_991_360, _config("llama", 7168, 19200, 62, 56, 8, 32256)),
    # mistral
    "Mistral-7B-v0.1": Published(7_241_732_096, _config("mistral", 4096, 14336, 32, 32, 8, 32000)),
    "Mistral-Nemo": Published(12_247_782_400, _config("mistral", 5120, 14336, 40, 32, 8, 131072, head_dim=128)),
    "Mistral-Small-24B": Published(23_572_403_200, _config("mistral", 5120, 32768, 40, 32, 8, 131072, head_dim=128)),
    "Mistral-Large-2407": Published(122_610_069_504, _config("mistral", 12288, 28672, 88, 96, 8, 32768, head_dim=128)),
    # qwen2, qwen3
    "Qwen2.5-0.5B": Published(494_032_768, _config("qwen2", 896, 4864, 24, 14, 2, 151936, **_TIED)),
    "Qwen2.5-7B": Published(7_615_616_512, _config("qwen2", 3584, 18944, 28, 28, 4, 152064)),
    "Qwen2.5-14B": Published(14_770_033_664, _config("qwen2", 5120, 13824, 48, 40, 8, 152064)),
    "Qwen2.5-72B": Published(72_706_203_648, _config("qwen2", 8192, 29568, 80, 64, 8, 152064)),
    "Qwen3-0.6B": Published(596_049_920, _config("qwen3", 1024, 3072, 28, 16, 8, 151936, head_dim=128, **_TIED)),
    "Qwen3-8B": Published(8_190_735_360, _config("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128)),
    "Qwen3-32B": Published(32_762_123_264, _config("qwen3", 5120, 25600, 64, 64, 8, 151936, head_dim=128)),
    # with experts
    "Mixtral-8x7B": Published(46_702_792_704, _config("mixtral", 4096, 14336, 32, 32, 8, 32000, num_local_experts=8)),
    "Mixtral-8x22B": Published(140_620_634_112, _config("mixtral", 6144, 16384, 56, 48, 8, 32000, num_local_experts=8)),
    "Qwen1.5-MoE-A2.7B": Published(14_315_784_192, _config("qwen2_moe", 2048, 5632, 24, 16, 16, 151936, num_experts=60)),
    "Qwen2-57B-A14B": Published(
        57_400_000_000,
        _config("qwen2_moe", 3584, 18944, 28, 28, 4, 151936, num_experts=64, num_experts_per_tok=8)
        | {"moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480},
    ),
    "Qwen3-30B-A3B": Published(
        30_532_122_624, _config("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, head_dim=128, moe_intermediate_size=768)
    ),
    "Qwen3-235B-A22B": Published(
        235_093_634_560, _config("qwen3_moe", 4096, 12288, 94, 64, 4, 151936, head_dim=128, moe_intermediate_size=1536)
    ),
    "Qwen3-Coder-480B-A35B": Published(
        480_154_875_392,
        _config("qwen3_moe", 6144, 8192, 62, 96, 8, 151936, head_dim=128, moe_intermediate_size=2560, num_experts=160),
    ),
    "gpt-oss-20b": Published(20_914_757_184, {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32}),
    "gpt-oss-120b": Published(116_829_156_672, {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128}),
    "GLM-4.5-Air": Published(
        110_468_824_832,
        _config("glm4_moe", 4096, 10944, 46, 96, 8, 151552, n_routed_experts=128, moe_intermediate_size=1408, **_GLM),
        others=3_616_573_568,
    ),
    "GLM-4.5": Published(
        358_337_791_296,
        _config("glm4_moe", 5120, 12288, 92, 96, 8, 151552, n_routed_experts=160, moe_intermediate_size=1536, **_GLM)
        | {"first_k_dense_replace": 3, "use_qk_norm": True},
        others=5_539_962_272,
    ),
    "MiMo-V2-Flash": Published(309_000_000_000, _config("mimo_v2_flash", 4096, 16384, 48, 64, 4, 152576)),
    # latent attention
    "DeepSeek-V2-Lite": Published(
        15_706_484_224, _config("deepseek_v2", 2048, 10944, 27, 16, 16, 102400, q_lora_rank=None, **_DEEPSEEK)
    ),
    "DeepSeek-V2": Published(
        235_741_434_880,
        _config("deepseek_v2", 5120, 12288, 60, 128, 128, 102400, **_DEEPSEEK)
        | {"moe_intermediate_size": 1536, "n_routed_experts": 160},
    ),
    "DeepSeek-V3": Published(671_026_419_200, _config("deepseek_v3", 7168, 18432, 61, 128, 128, 129280)),
    "Moonlight-16B-A3B": Published(
        15_960_111_936,
        _config("deepseek_v3", 2048, 11264, 27, 16, 16, 163840, q_lora_rank=None, **_DEEPSEEK)
        | {"n_routed_experts": 64, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0},
    ),
    # other dense families
    "SmolLM3-3B": Published(3_075_098_624, _config("smollm3", 2048, 11008, 36, 16, 4, 128256)),
    "OLMo-2-0425-1B": Published(1_484_916_736, _config("olmo2", 2048, 8192, 16, 16, 16, 100352)),
    "OLMo-2-1124-7B": Published(7_298_617_344, _config("olmo2", 4096, 11008, 32, 32, 32, 100352)),
    "OLMo-2-0325-32B": Published(32_234_279_936, _config("olmo2", 5120, 27648, 64, 40, 8, 100352)),
    "Phi-3-mini-4k": Published(3_821_079_552, _config("phi3", 3072, 8192, 32, 32, 32, 32064)),
    "phi-4": Published(14_659_507_200, _config("phi3", 5120, 17920, 40, 40, 10, 100352)),
    "Phi-4-mini": Published(3_836_021_760, _config("phi3", 3072, 8192, 32, 24, 8, 200064, partial_rotary_factor=0.75, **_TIED)),
    "glm-4-9b-chat-hf": Published(9_399_951_360, _config("glm", 4096, 13696, 40, 32, 2, 151552)),
    "GLM-4-9B-0414": Published(9_400_279_040, _config("glm4", 4096, 13696, 40, 32, 2, 151552)),
    "GLM-4-32B-0414": Published(32_566_081_536, _config("glm4", 6144, 23040, 61, 48, 2, 151552, attention_bias=False)),
    "gemma-2-2b": Published(2_614_341_888, _config("gemma2", 2304, 9216, 26, 8, 4, 256000)),
    "gemma-2-9b": Published(9_241_705_984, _config("gemma2", 3584, 14336, 42, 16, 8, 256000)),
    "gemma-2-27b": Published(27_227_128_320, _config("gemma2", 4608, 36864, 46, 32, 16, 256000, head_dim=128)),
    "gemma-3-270m": Published(268_098_176, _config("gemma3_text", 640, 2048, 18, 4, 1, 262144)),
    "gemma-3-1b": Published(999_885_952, _config("gemma3_text", 1152, 6912, 26, 4, 1, 262144)),
    # text parts of multimodal models, whose text_config leaves out what is as in its class
    "gemma-3-4b": Published(
        4_300_079_472,
        _multimodal(
            "gemma3",
            {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
            | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
        ),
        others=_SIGLIP + 1152 * 2560 + 1152,
    ),
    "gemma-3-12b": Published(
        12_187_325_040,
        _multimodal(
            "gemma3",
            {"hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16, "num_key_value_heads": 8}
            | {"model_type": "gemma3_text", "num_hidden_layers": 48, "sliding_window": 1024},
        ),
        others=_SIGLIP + 1152 * 3840 + 1152,
    ),
    "gemma-3-27b": Published(
        27_432_406_640,
        _multimodal(
            "gemma3",
            {"hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 16}
            | {"head_dim": 128, "num_hidden_layers": 62, "query_pre_attn_scalar": 168, "sliding_window": 1024},
        ),
        others=_SIGLIP + 1152 * 5376 + 1152,
    ),
    "Mistral-Small-3.1-24B": Published(
        24_011_361_280,
        _multimodal(
            "mistral3",
            {"model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40}
            | {"head_dim": 128, "vocab_size": 131072, "rope_theta": 1e9, "sliding_window": None},
        ),
        others=438_958_080,
    ),
    "llava-1.5-7b": Published(
        7_063_427_072,
        _multimodal(
            "llava", {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}
        ),
        others=_CLIP + 2 * 4096 + (1024 + 4096) * 4096,
    ),
    "llava-v1.6-mistral-7b": Published(
        7_566_747_648,
        _multimodal(
            "llava_next",
            {"model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 32064}
            | {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None},
        ),
        others=_CLIP + 2 * 4096 + (1024 + 4096) * 4096 + 4096,
    ),
    "Qwen2-Audio-7B": Published(
        8_397_094_912,
        _multimodal(
            "qwen2_audio",
            {"model_type": "qwen2", "intermediate_size": 11008, "max_position_embeddings": 8192, "vocab_size": 156032},
        ),
        others=_WHISPER + 1280 * 4096 + 4096,
    ),
    "paligemma2-3b": Published(
        3_032_242_416,
        _multimodal(
            "paligemma",
            {"model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
            | {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 257216},
        ),
        others=_SIGLIP - (4096 - 256) * 1152 + 1152 * 2304 + 2304,
    ),
}
