"""What a model is, as far as placing and computing it goes: one frozen value, read from a checkpoint's own header.

`read` (in `placement.checkpoint_header`) makes it from ``config.json`` or from a GGUF file.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

DType = Literal["float32", "bfloat16", "float16"]

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


class ModelError(ValueError):
    """A model that cannot be used: names the file and the field or tensor at fault."""


class RopeSpec(BaseModel):
    """Rotary position embedding. Field meanings follow the ``rope_scaling``/``rope_parameters`` keys of config.json.

    ``factor`` is the context extension factor; ``original_max_position`` the trained context length in tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class ModelSpec(BaseModel):
    """A decoder-only transformer. Sizes are global (before any split)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: str
    """``model_type`` of config.json or ``general.architecture`` of a GGUF file."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    norm_eps: float
    activation: Literal["silu"] = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["none", "head"] = "none"
    """``head``: RMS norm over each head's ``head_dim``, before rope (Qwen3)."""
    tie_embeddings: bool = False
    windows: tuple[int | None, ...]
    """Sliding window of each layer in tokens (a query sees itself and ``window - 1`` tokens before it); None: full."""
    rope: RopeSpec = RopeSpec()
    dtype: DType = "bfloat16"
    """Type the checkpoint was written in; for a quantised file, the type it is computed in."""
    quantization: str | None = None
    """None, or the file's dominant quantisation, for example ``Q4_1``."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def queries_per_kv(self) -> int:
        """Query heads of one KV group: the unit of an attention split."""
        return self.num_heads // self.num_kv_heads
