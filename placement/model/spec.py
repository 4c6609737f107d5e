"""What a model is, as far as placing and computing it goes: one frozen value, read from a checkpoint's own header.

`read` (in `placement.checkpoint.header`) makes it from ``config.json`` or from a GGUF file.
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
    """A model that cannot be used: names the file and the field or tensor at fault."""

    code = "bad_model"


class RopeSpec(BaseModel):
    """Rotary position embedding. Field meanings follow the ``rope_scaling``/``rope_parameters`` keys of config.json.

    ``factor`` is the context extension factor; ``original_max_position`` the trained context length in tokens.
    Two kinds look at how long a sequence is (`depends_on_length`): ``longrope`` and ``dynamic``.
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
    """``longrope``: what each frequency is divided by in sequences of at most `original_max_position` tokens."""
    long_factor: tuple[Positive, ...] = ()
    """``longrope``: the same in longer sequences."""
    rotary_dims: PositiveInt | None = None
    """Dimensions of each head that are rotated, from the first on; None: all."""
    interleaved: bool = False
    """Neighbouring dimensions are rotated together, not those half a head apart."""

    @model_validator(mode="after")
    def _factors_fit(self) -> Self:
        if self.rotary_dims is not None and self.rotary_dims % 2:
            raise ValueError(f"rotary_dims={self.rotary_dims} is odd, but rotary embedding rotates pairs")
        if self.kind in ("longrope", "dynamic") and self.original_max_position is None:
            raise ValueError(f"rope kind {self.kind!r} needs original_max_position (the trained context length)")
        return self

    @property
    def depends_on_length(self) -> bool:
        """Whether the rotation of a position differs between sequences."""
        return self.kind in ("longrope", "dynamic")

    def deciding_length(self, prompt_length: int, longest: int) -> int:
        """The length a sequence counts as having from its first token on; `longest` is what it can grow to.

        ``longrope``: the longest, for a sequence must not change its frequencies on the way (a query rotated by one set does
        not match keys rotated by the other). ``dynamic``: the prompt's; tokens past it count the tokens up to them.
        """
        return longest if self.kind == "longrope" else prompt_length

    def length_class(self, deciding_length: int) -> int:
        """Sequences of one class have their tokens rotated alike, so that the keys of one can stand for those of another.

        Up to the trained length all are alike.
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
    """KV heads of the layers with a window, where they have another number than the others."""
    head_dim: PositiveInt
    """Dimensions of a query and of a key."""
    value_dim: PositiveInt | None = None
    """Dimensions of a value, where they are fewer."""
    value_scale: Positive = 1.0
    """Values are multiplied by this."""
    intermediate_size: PositiveInt
    """Columns of the MLP of a dense layer."""
    vocab_size: PositiveInt
    max_position: PositiveInt
    norm_eps: Positive
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """What the gate of the MLP goes through."""
    moe: MoESpec | None = None
    """The layers with experts; None: every layer is dense."""
    sinks: Literal["none", "all", "windows"] = "none"
    """Layers whose query heads each have a learned score beside those of the keys, which takes its share of the softmax and
    adds nothing (gpt-oss): all, or those with a window."""
    sinks_name: Literal["sinks", "attention_sink_bias"] = "sinks"
    """What the checkpoint calls them."""
    mtp_layers: int = 0
    """Layers after the last that guess further tokens. The checkpoint has them; they are not loaded."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["none", "head", "width"] = "none"
    """RMS norm of queries and keys before rope. ``head``: over each head (Qwen3); ``width``: over all at once (OLMo-2)."""
    norms: Literal["pre", "post", "sandwich", "sandwich_glm"] = "pre"
    """Norms before the two halves of a layer, after them, or both; which names they have is in `placement.ownership.shards`."""
    norm_offset: float = 0.0
    """Added to every norm's weight (Gemma stores weights around 0)."""
    embedding_scale: Positive = 1.0
    """Token embeddings are multiplied by this."""
    attention_scale: Positive | None = None
    """Attention scores are multiplied by this; None: ``head_dim ** -0.5``."""
    attention_softcap: Positive | None = None
    """c: attention scores s become ``c * tanh(s / c)``."""
    logit_softcap: Positive | None = None
    """The same for the logits."""
    fused_qkv: bool = False
    """The checkpoint holds q, k and v in one matrix."""
    fused_gate_up: bool = False
    """The checkpoint holds the MLP's gate and up in one matrix."""
    tie_embeddings: bool = False
    windows: tuple[PositiveInt | None, ...]
    """Sliding window of each layer in tokens (a query sees itself and ``window - 1`` tokens before it); None: full."""
    rope: RopeSpec = RopeSpec()
    mla: MLASpec | None = None
    """Latent attention; then `num_kv_heads` is 1 (the latent) and `head_dim` the dimensions of a query."""
    local_rope: RopeSpec | None = None
    """Rope of the layers with a window, where they have one of their own."""
    unrotated_layers: tuple[int, ...] = ()
    """Layers without rope."""
    dtype: DType = "bfloat16"
    """Type the checkpoint was written in; for a quantised file, the type it is computed in."""
    quantization: str | None = None
    """None, or the file's dominant quantisation, for example ``Q4_1``."""
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
        """The kinds of attention its layers have: one, or that of the layers that see everything and that of the others."""
        if self.mla is not None:
            return (latent_kind(self.num_heads, self.mla.latent_dim, self.mla.kv_lora_rank),)
        dims = (self.head_dim, self.value_dim or self.head_dim)
        main = plain_kind(self.num_heads, self.num_kv_heads, *dims)
        if self.window_kv_heads is None:
            return (main,)
        return (main, plain_kind(self.num_heads, self.window_kv_heads, *dims, label="window "))

    def kind_of(self, layer: int) -> int:
        """The kind of a layer, as an index of `kinds`."""
        return int(self.window_kv_heads is not None and self.windows[layer] is not None)

    @property
    def queries_per_kv(self) -> int:
        """Query heads of one KV group of the first kind."""
        return self.num_heads // self.num_kv_heads

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that its rope is made for."""
        return self.head_dim if self.mla is None else self.mla.rope_dim

    @property
    def kv_planes(self) -> int:
        """`AttentionKind.planes`, which all kinds have alike."""
        return self.kinds[0].planes

    @property
    def kv_dim(self) -> int:
        """Values of a token in one plane of the cache, for each KV head; that of keys, where values have another size."""
        return self.kinds[0].key_dim

    @property
    def scores_scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def widths(self) -> dict[str, int]:
        """Columns of each kind of gated MLP the model has: what a tp group splits."""
        moe = self.moe
        dense = {} if moe is not None and len(moe.layers) == self.num_layers else {"MLP": self.intermediate_size}
        shared = {"shared expert": moe.shared_size} if moe is not None and moe.shared_size else {}
        return dense | shared

    def moe_of(self, layer: int) -> MoESpec | None:
        """The experts of a layer; None where it is dense."""
        return self.moe if self.moe is not None and layer in self.moe.layers else None

    def has_sinks(self, layer: int) -> bool:
        """Whether the query heads of a layer have sinks."""
        return self.sinks == "all" or (self.sinks == "windows" and self.windows[layer] is not None)

    def rope_of(self, layer: int) -> RopeSpec | None:
        """The rope of a layer; None where it has none."""
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
