"""What each architecture of a GGUF file is, where the file does not say so itself.

llama.cpp knows these things by the architecture's name: they have no field.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """One ``general.architecture``. Fields that `ModelSpec` has too mean the same there."""

    qk_norm: str = "none"
    norms: str = "pre"
    gemma: bool = False
    """Norm weights are stored with 1 added; embeddings are scaled by ``sqrt(hidden_size)``."""
    wide_scale_layers: int = 0
    """The size, by its number of layers, whose scores are scaled by ``(hidden_size / num_heads) ** -0.5``."""
    caps: tuple[float | None, float | None] = (None, None)
    """Caps of attention scores and logits, where the file gives none."""
    activation: str = "silu"
    window: int | None = None
    """Window, where the file gives none."""
    window_pattern: int | None = None
    """Every layer whose number this divides, counted from 1, sees everything; None: the window is for all layers."""
    local_theta: float | None = None
    """Rope base of the layers with a window, where it is another."""
    partial: bool = False
    """Heads may be rotated in part."""
    interleaved: bool = False
    permuted: bool = False
    """The converter reorders q and k rows, so that an interleaved rope does what the model's own did."""
    experts: bool = False
    """Files may have experts; the weights of a token's are made to add up to 1."""
    no_rope_interval: int | None = None
    """Every layer whose number this divides, counted from 1, has no rope."""


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
"""By ``general.architecture`` (Mistral and Mixtral files say llama)."""
