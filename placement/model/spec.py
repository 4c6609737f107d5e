"""The model specification: every size and option that placing and computing a model needs, as one frozen value.

`read` (in `placement.checkpoint.header`) builds it from ``config.json`` or from the header of a GGUF file.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from placement.model.attention_kind import AttentionKind, latent_kind, plain_kind
from placement.model.bounds import Positive, PositiveInt
from placement.model.errors import ReportedError
from placement.model.mla_spec import MLASpec
from placement.model.moe_spec import MoESpec

DType = Literal["float32", "bfloat16", "float16"]

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


class ModelError(ReportedError, ValueError):
    """The model is invalid or unsupported; the message names the file and the field or tensor at fault."""

    code = "bad_model"


class RopeSpec(BaseModel):
    """Rotary position embedding. Field meanings follow the ``rope_scaling``/``rope_parameters`` keys of config.json.

    ``factor`` is the context extension factor; ``original_max_position`` is the trained context length in tokens. The
    frequencies of two kinds, ``longrope`` and ``dynamic``, depend on the sequence length (`depends_on_length`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["default", "linear", "llama3", "yarn", "longrope", "dynamic"] = "default"
    theta: Positive = 10000.0
    factor: Positive = 1.0
    original_max_position: PositiveInt | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[Positive, ...] = ()
    """``longrope``: divisor of each frequency in sequences of at most `original_max_position` tokens."""
    long_factor: tuple[Positive, ...] = ()
    """``longrope``: divisor of each frequency in longer sequences."""
    rotary_dims: PositiveInt | None = None
    """Number of leading dimensions of each head that are rotated; None: all."""
    interleaved: bool = False
    """Whether neighbouring dimensions are rotated as pairs, instead of dimensions half a head apart."""

    @model_validator(mode="after")
    def _factors_fit(self) -> Self:
        if self.rotary_dims is not None and self.rotary_dims % 2:
            raise ValueError(f"rotary_dims={self.rotary_dims} is odd, but rotary embedding rotates pairs")
        if self.kind in ("longrope", "dynamic") and self.original_max_position is None:
            raise ValueError(f"rope kind {self.kind!r} needs original_max_position (the trained context length)")
        return self

    @property
    def depends_on_length(self) -> bool:
        """Whether the rotation at a position depends on the length of the sequence (kinds ``longrope`` and ``dynamic``)."""
        return self.kind in ("longrope", "dynamic")

    def context_length(self, stated: int) -> int:
        """Returns the model's context length in tokens, if its file states `stated` positions.

        With ``dynamic``, files state the trained length, which `factor` extends. With ``yarn``, some files state the trained
        length or a little more, others the extended one: the longer of `stated` and ``original_max_position * factor`` counts.
        With every other kind it is `stated`.
        """
        if self.kind == "dynamic":
            return int(stated * self.factor)
        if self.kind == "yarn":
            return max(stated, int((self.original_max_position or 0) * self.factor))
        return stated

    def deciding_length(self, prompt_length: int, longest: int) -> int:
        """Returns the length, in tokens, by which the frequencies of a sequence are chosen when it starts.

        `prompt_length` and `longest`, the length the sequence may grow to, are in tokens. ``longrope`` uses the latter, because
        a sequence must not change its frequencies later: a query rotated by one set does not match keys rotated by the other.
        The other kinds use the prompt length; with ``dynamic``, each token after the prompt uses the number of tokens up to it.
        """
        return longest if self.kind == "longrope" else prompt_length

    def length_class(self, deciding_length: int) -> int:
        """Returns a number that is equal for sequences which rotate equally and can share cached keys.

        `deciding_length` is the result of the method of that name, in tokens. All sequences up to the trained length, and all
        if the rotation does not depend on length, are of class 0.
        """
        if not self.depends_on_length or deciding_length <= (self.original_max_position or 0):
            return 0
        return deciding_length if self.kind == "dynamic" else 1


class ModelSpec(BaseModel):
    """A decoder-only transformer. Sizes are global (before any split)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: str
    """``model_type`` of config.json or ``general.architecture`` of a GGUF file."""
    hidden_size: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    window_kv_heads: PositiveInt | None = None
    """Number of KV heads of the sliding-window layers; None: `num_kv_heads`."""
    head_dim: PositiveInt
    """Number of dimensions of a query and of a key head."""
    value_dim: PositiveInt | None = None
    """Number of dimensions of a value head, if fewer than `head_dim`; None: `head_dim`."""
    value_scale: Positive = 1.0
    """Factor applied to the values."""
    intermediate_size: PositiveInt
    """Intermediate size (columns) of the MLP of a dense layer."""
    vocab_size: PositiveInt
    max_position: PositiveInt
    """Context length in tokens, with the extension by `rope`; see `RopeSpec.context_length`."""
    norm_eps: Positive
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Activation function of the MLP's gate."""
    moe: MoESpec | None = None
    """The MoE layers; None: every layer is dense."""
    sinks: Literal["none", "all", "windows"] = "none"
    """Layers with attention sinks: none, all, or those with a window. A sink is a learned score of a query head that takes its
    share of the softmax and contributes no value (gpt-oss)."""
    sinks_name: Literal["sinks", "attention_sink_bias"] = "sinks"
    """Name of the sinks' tensor in the checkpoint."""
    mtp_layers: int = 0
    """Number of multi-token prediction (MTP) layers in the checkpoint, after the last decoder layer. They are not loaded."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["none", "head", "width"] = "none"
    """RMS norm of queries and keys before rope. ``head``: over each head (Qwen3); ``width``: over all heads (OLMo-2)."""
    norms: Literal["pre", "post", "sandwich", "sandwich_glm"] = "pre"
    """Whether norms stand before attention and MLP, after them, or both; `placement.ownership.shards` has their names."""
    norm_offset: float = 0.0
    """Offset added to every norm weight (Gemma stores weights around 0)."""
    embedding_scale: Positive = 1.0
    """Factor applied to the token embeddings."""
    attention_scale: Positive | None = None
    """Factor applied to the attention scores; None: ``head_dim ** -0.5``."""
    attention_softcap: Positive | None = None
    """Soft cap c of the attention scores s: they become ``c * tanh(s / c)``."""
    logit_softcap: Positive | None = None
    """Soft cap of the logits, by the same formula."""
    fused_qkv: bool = False
    """Whether the checkpoint stores the q, k and v projections as one matrix."""
    fused_gate_up: bool = False
    """Whether the checkpoint stores the MLP's gate and up projections as one matrix."""
    tie_embeddings: bool = False
    windows: tuple[PositiveInt | None, ...]
    """Sliding window of each layer in tokens (a query attends to itself and ``window - 1`` tokens before it); None: full."""
    rope: RopeSpec = RopeSpec()
    mla: MLASpec | None = None
    """Sizes of latent attention; if set, `num_kv_heads` is 1 (the latent) and `head_dim` is the size of a query."""
    local_rope: RopeSpec | None = None
    """Rope of the sliding-window layers; None: `rope`."""
    unrotated_layers: tuple[int, ...] = ()
    """Indices of the layers without rope."""
    dtype: DType = "bfloat16"
    """Data type of the checkpoint; for a quantised file, the type it is computed in."""
    quantization: str | None = None
    """Dominant quantisation of the file, for example ``Q4_1``; None: not quantised."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        for name in ("num_kv_heads", "window_kv_heads"):
            if self.num_heads % (getattr(self, name) or 1):
                raise ValueError(f"num_heads={self.num_heads} is not a multiple of {name}={getattr(self, name)}")
        if self.rotary_dim % 2:
            raise ValueError(f"head_dim={self.rotary_dim} is odd, but rotary embedding rotates pairs")
        if self.mla is not None:
            _check_latent(self, self.mla)
        if len(self.windows) != self.num_layers:
            raise ValueError(f"windows names {len(self.windows)} layers, but num_layers={self.num_layers}")
        _check_heads(self)
        if self.moe is not None and not set(self.moe.layers) <= set(range(self.num_layers)):
            raise ValueError(f"moe names the layers {self.moe.layers}, but num_layers={self.num_layers}")
        for rope in filter(None, (self.rope, self.local_rope)):
            _check_rope(rope, self.rotary_dim)
        return self

    @property
    def kinds(self) -> tuple[AttentionKind, ...]:
        """Attention kinds of the layers: one, or first that of the full-attention layers and then that of the window layers."""
        if self.mla is not None:
            return (latent_kind(self.num_heads, self.mla.latent_dim, self.mla.kv_lora_rank),)
        dims = (self.head_dim, self.value_dim or self.head_dim)
        main = plain_kind(self.num_heads, self.num_kv_heads, *dims)
        if self.window_kv_heads is None:
            return (main,)
        return (main, plain_kind(self.num_heads, self.window_kv_heads, *dims, label="window "))

    def kind_of(self, layer: int) -> int:
        """Returns the attention kind of the layer with this index, as an index into `kinds`."""
        return int(self.window_kv_heads is not None and self.windows[layer] is not None)

    @property
    def queries_per_kv(self) -> int:
        """Number of query heads per KV head, in layers of the first attention kind."""
        return self.num_heads // self.num_kv_heads

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that rope applies to, before `RopeSpec.rotary_dims`."""
        return self.head_dim if self.mla is None else self.mla.rope_dim

    @property
    def kv_planes(self) -> int:
        """Number of KV cache tensors of a layer, equal for all attention kinds: 2 (keys and values), or 1 (latents)."""
        return self.kinds[0].planes

    @property
    def kv_dim(self) -> int:
        """Number of values per token and KV head in the key tensor of the cache (the value tensor may have fewer)."""
        return self.kinds[0].key_dim

    @property
    def scores_scale(self) -> float:
        """Factor applied to the attention scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def widths(self) -> dict[str, int]:
        """Intermediate size of each kind of gated MLP in the model, by name (``MLP``, ``shared expert``): the columns that a tp
        group splits. Routed experts are not included."""
        moe = self.moe
        dense = {} if moe is not None and len(moe.layers) == self.num_layers else {"MLP": self.intermediate_size}
        shared = {"shared expert": moe.shared_size} if moe is not None and moe.shared_size else {}
        return dense | shared

    def moe_of(self, layer: int) -> MoESpec | None:
        """Returns the MoE specification of the layer with this index, or None if the layer is dense."""
        return self.moe if self.moe is not None and layer in self.moe.layers else None

    def has_sinks(self, layer: int) -> bool:
        """Whether the query heads of the layer with this index have attention sinks."""
        return self.sinks == "all" or (self.sinks == "windows" and self.windows[layer] is not None)

    def rope_of(self, layer: int) -> RopeSpec | None:
        """Returns the RoPE parameters of the layer with this index, or None if the layer has no RoPE."""
        if layer in self.unrotated_layers:
            return None
        return self.rope if self.local_rope is None or self.windows[layer] is None else self.local_rope


def _check_heads(spec: ModelSpec) -> None:
    if spec.window_kv_heads is not None and not 0 < spec.windows.count(None) < spec.num_layers:
        raise ValueError(
            f"window_kv_heads={spec.window_kv_heads} sets the layers with a window apart, but "
            f"{spec.num_layers - spec.windows.count(None)} of {spec.num_layers} layers have one"
        )
    if spec.value_dim is not None and spec.value_dim >= spec.head_dim:
        raise ValueError(f"value_dim={spec.value_dim} is given, so it must be less than head_dim={spec.head_dim}")
    if (spec.window_kv_heads, spec.value_dim, spec.value_scale) == (None, None, 1.0):
        return
    if spec.mla is not None or spec.qk_norm != "none":
        raise ValueError(
            "values of their own size or scale, or KV heads of their own in layers with a window, together with latent "
            "attention or norms of queries and keys are not supported"
        )


def _check_rope(rope: RopeSpec, head_dim: int) -> None:
    dims = rope.rotary_dims or head_dim
    if dims > head_dim:
        raise ValueError(f"rotary_dims={dims} is more than head_dim={head_dim}")
    for name in ("short_factor", "long_factor"):
        given = len(getattr(rope, name))
        if given != (dims // 2 if rope.kind == "longrope" else 0):
            raise ValueError(f"{name} has {given} numbers, but rope kind {rope.kind!r} rotates {dims // 2} pairs of dimensions")


def _check_latent(spec: ModelSpec, mla: MLASpec) -> None:
    if (spec.num_kv_heads, spec.head_dim) != (1, mla.query_dim):
        raise ValueError(
            f"latent attention has one KV head and queries of {mla.query_dim}, not num_kv_heads={spec.num_kv_heads} and "
            f"head_dim={spec.head_dim}"
        )
    if mla.value_dim > mla.query_dim:
        raise ValueError(f"value_dim={mla.value_dim} is more than the {mla.query_dim} dimensions of a query")
    if any(spec.windows) or spec.attention_softcap is not None or spec.qk_norm != "none":
        raise ValueError("latent attention with windows, capped scores or norms of queries and keys is not supported")
