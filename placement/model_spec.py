"""What a model is, as far as placing and computing it goes: one frozen value, read from a checkpoint's own header.

`read` (in `placement.checkpoint_header`) makes it from ``config.json`` or from a GGUF file.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

DType = Literal["float32", "bfloat16", "float16"]

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ModelError(ValueError):
    """A model that cannot be used: names the file and the field or tensor at fault."""


class RopeSpec(BaseModel):
    """Rotary position embedding. Field meanings follow the ``rope_scaling``/``rope_parameters`` keys of config.json.

    ``factor`` is the context extension factor; ``original_max_position`` the trained context length in tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    theta: Positive = 10000.0
    factor: Positive = 1.0
    original_max_position: Count | None = None
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
    hidden_size: Count
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    intermediate_size: Count
    vocab_size: Count
    max_position: Count
    norm_eps: Positive
    activation: Literal["silu"] = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["none", "head"] = "none"
    """``head``: RMS norm over each head's ``head_dim``, before rope (Qwen3)."""
    tie_embeddings: bool = False
    windows: tuple[Count | None, ...]
    """Sliding window of each layer in tokens (a query sees itself and ``window - 1`` tokens before it); None: full."""
    rope: RopeSpec = RopeSpec()
    dtype: DType = "bfloat16"
    """Type the checkpoint was written in; for a quantised file, the type it is computed in."""
    quantization: str | None = None
    """None, or the file's dominant quantisation, for example ``Q4_1``."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd, but rotary embedding turns pairs")
        if len(self.windows) != self.num_layers:
            raise ValueError(f"windows names {len(self.windows)} layers, but num_layers={self.num_layers}")
        return self

    @property
    def queries_per_kv(self) -> int:
        """Query heads of one KV group: the unit of an attention split."""
        return self.num_heads // self.num_kv_heads
