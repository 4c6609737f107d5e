"""Properties of the supported GGUF architectures for which the file has no field.

llama.cpp derives them from the name of the architecture.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """One ``general.architecture``. Fields that `ModelSpec` also has mean the same there."""

    qk_norm: str = "none"
    norms: str = "pre"
    gemma: bool = False
    """Whether norm weights are stored with 1 added, and embeddings are scaled by ``sqrt(hidden_size)``."""
    wide_scale_layers: int = 0
    """Number of layers of the one model size whose attention scores are scaled by ``(hidden_size / num_heads) ** -0.5``."""
    caps: tuple[float | None, float | None] = (None, None)
    """Soft caps of the attention scores and of the logits, used if the file gives none."""
    activation: str = "silu"
    window: int | None = None
    """Sliding window in tokens, used if the file gives none."""
    window_pattern: int | None = None
    """Interval of the layers with full attention: those whose number, counted from 1, is a multiple of it. None: all layers
    have the window."""
    local_theta: float | None = None
    """RoPE base of the sliding-window layers, if it differs."""
    partial: bool = False
    """Whether heads may be rotated in part (partial RoPE)."""
    interleaved: bool = False
    permuted: bool = False
    """Whether the converter reorders the rows of q and k, so that an interleaved RoPE gives the result of the original one."""
    experts: bool = False
    """Whether files may have experts. The weights of a token's chosen experts are normalised to a sum of 1."""
    no_rope_interval: int | None = None
    """Interval of the layers without RoPE: those whose number, counted from 1, is a multiple of it."""


ARCHITECTURES = {
    "llama": Architecture(permuted=True, experts=True),
    "qwen2": Architecture(),
    "qwen3": Architecture(qk_norm="head"),
    "qwen3moe": Architecture(qk_norm="head", experts=True),
    "smollm3": Architecture(permuted=True, no_rope_interval=4),
    "olmo2": Architecture(qk_norm="width", norms="post"),
    "phi3": Architecture(partial=True),
    "glm4": Architecture(norms="sandwich_glm", partial=True, interleaved=True),
    "gemma2": Architecture(
        norms="sandwich",
        gemma=True,
        wide_scale_layers=46,
        caps=(50.0, 30.0),
        activation="gelu_tanh",
        window=4096,
        window_pattern=2,
    ),
    "gemma3": Architecture(
        qk_norm="head",
        norms="sandwich",
        gemma=True,
        wide_scale_layers=62,
        activation="gelu_tanh",
        window_pattern=6,
        local_theta=10000.0,
    ),
}
"""The supported architectures by ``general.architecture`` (Mistral and Mixtral files use "llama")."""
