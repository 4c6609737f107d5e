"""Reads a `ModelSpec` from the header of a GGUF file.

A missing ``output.weight`` means tied embeddings, and the presence of bias tensors means biases. The tensor
``rope_freqs.weight`` holds the result of Llama 3's RoPE scaling, one divisor per frequency, from which
`placement.checkpoint.gguf.rope` recovers the parameters. Properties without a field are in
`placement.checkpoint.gguf.families`.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from placement.checkpoint.directory.header_fields import HeaderFields, made
from placement.checkpoint.gguf.families import ARCHITECTURES, Architecture
from placement.checkpoint.gguf.gguf_file import TensorInfo, is_gguf
from placement.checkpoint.gguf.rope import read_ropes
from placement.checkpoint.gguf.split import GGUFModel, read_model
from placement.model.moe_spec import MoESpec
from placement.model.spec import DType, ModelError, ModelSpec

__all__ = ["is_gguf", "read"]

_PLAIN: dict[GGMLQuantizationType, DType] = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}


def read(path: Path) -> ModelSpec:
    """Returns the specification of the model in the GGUF file `path`, or in the split one whose part or folder it is, from the
    headers alone. Raises `ModelError` if a file is damaged or cannot be read, if a part is missing, if the architecture or RoPE
    scaling is not supported, or if a field is missing or not valid; the message names the file and the field."""
    header = read_model(path)
    path = header.files[0]
    fields = HeaderFields(path, header.fields)
    family = fields.text("general.architecture")
    if family not in ARCHITECTURES:
        raise fields.fault("general.architecture", f"the architectures known here are {', '.join(ARCHITECTURES)}")
    return _spec(path, header, fields, family)


def _spec(path: Path, header: GGUFModel, fields: HeaderFields, family: str) -> ModelSpec:
    names = _names(family)
    num_heads, hidden_size = fields.whole(names["num_heads"]), fields.whole(names["hidden_size"])
    num_layers = fields.num_layers(names["num_layers"])
    head_dim = fields.whole(names["head_dim"], hidden_size // num_heads if num_heads > 0 else 0)
    if fields.whole(f"{family}.attention.value_length", head_dim) != head_dim:
        raise fields.fault(f"{family}.attention.value_length", f"{names['head_dim']} is {head_dim}: they must be equal")
    dtype, quantization = _dtype(header)
    known = ARCHITECTURES[family]
    windows = _windows(fields, family, known, num_layers)
    rope, local_rope = read_ropes(path, header, fields, family, head_dim)
    return made(
        ModelSpec,
        path,
        names,
        family=family,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.whole(names["num_kv_heads"], num_heads),
        head_dim=head_dim,
        intermediate_size=fields.whole(names["intermediate_size"]),
        vocab_size=_vocab_size(header, fields, family),
        max_position=rope.context_length(fields.whole(names["max_position"])),
        norm_eps=fields.number(names["norm_eps"]),
        activation=known.activation,
        qkv_bias=not header.tensors.keys().isdisjoint(("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")),
        o_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_down.bias" in header.tensors,
        moe=_moe(path, fields, family, num_layers),
        qk_norm=known.qk_norm,
        norms=known.norms,
        fused_qkv="blk.0.attn_qkv.weight" in header.tensors,
        fused_gate_up="blk.0.ffn_up.weight" in header.tensors and "blk.0.ffn_gate.weight" not in header.tensors,
        tie_embeddings="output.weight" not in header.tensors,
        windows=windows,
        rope=rope,
        local_rope=local_rope,
        unrotated_layers=_every(known.no_rope_interval, num_layers),
        dtype=dtype,
        quantization=quantization,
        bos_token_id=fields.whole("tokenizer.ggml.bos_token_id", None),
        eos_token_ids=_eos(fields),
        **(_gemma(fields, family, known, num_layers, num_heads, hidden_size, head_dim) if known.gemma else {}),
    )


def _windows(fields: HeaderFields, family: str, known: Architecture, num_layers: int) -> tuple[int | None, ...]:
    """Returns the attention window of each layer (None: full attention). A file gives the window and sometimes the pattern: the
    interval of the layers without one, or a flag for each layer."""
    window = fields.whole(f"{family}.attention.sliding_window", known.window) or None
    name = f"{family}.attention.sliding_window_pattern"
    if isinstance(fields.values.get(name), list):
        flags = fields.wholes(name) or []
        if len(flags) != num_layers:
            raise fields.fault(name, f"{family}.block_count is {num_layers}: it must name as many layers")
        return tuple(window if flag else None for flag in flags)
    everywhere = _every(fields.whole(name, known.window_pattern), num_layers)
    return tuple(None if layer in everywhere else window for layer in range(num_layers))


def _every(interval: int | None, num_layers: int) -> tuple[int, ...]:
    """Returns the layers whose number, counted from 1, is a multiple of the interval."""
    return tuple(range(interval - 1, num_layers, interval)) if interval else ()


def _gemma(
    fields: HeaderFields, family: str, known: Architecture, num_layers: int, num_heads: int, hidden_size: int, head_dim: int
) -> dict[str, Any]:
    attention, logits = known.caps
    per_score = hidden_size / num_heads if num_layers == known.wide_scale_layers else head_dim
    return {
        "norm_offset": 1.0,
        "embedding_scale": hidden_size**0.5,
        "attention_scale": per_score**-0.5,
        "attention_softcap": fields.number(f"{family}.attn_logit_softcapping", attention),
        "logit_softcap": fields.number(f"{family}.final_logit_softcapping", logits),
    }


def _names(family: str) -> dict[str, str]:
    """Returns the fields of `ModelSpec` and their names in the file."""
    return {
        "hidden_size": f"{family}.embedding_length",
        "num_layers": f"{family}.block_count",
        "num_heads": f"{family}.attention.head_count",
        "num_kv_heads": f"{family}.attention.head_count_kv",
        "head_dim": f"{family}.attention.key_length",
        "intermediate_size": f"{family}.feed_forward_length",
        "vocab_size": f"{family}.vocab_size",
        "max_position": f"{family}.context_length",
        "norm_eps": f"{family}.attention.layer_norm_rms_epsilon",
    }


def _moe(path: Path, fields: HeaderFields, family: str, num_layers: int) -> MoESpec | None:
    """Returns the MoE settings; None if the file counts no experts. All layers have experts, each layer in three stacked
    tensors."""
    names = {"num_experts": "expert_count", "top_k": "expert_used_count", "expert_size": "expert_feed_forward_length"}
    names = {field: f"{family}.{name}" for field, name in names.items()}
    if not fields.whole(names["num_experts"], 0):
        return None
    if not ARCHITECTURES[family].experts:
        raise fields.fault(names["num_experts"], f"mixtures of experts are not supported yet in {family} files")
    return made(
        MoESpec,
        path,
        names,
        num_experts=fields.whole(names["num_experts"]),
        top_k=fields.whole(names["top_k"]),
        expert_size=fields.whole(names["expert_size"], fields.whole(f"{family}.feed_forward_length")),
        layers=tuple(range(num_layers)),
        normalise=True,
        form="stacked",
    )


def _vocab_size(header: GGUFModel, fields: HeaderFields, family: str) -> int:
    """Returns the number of rows of the embedding. The fields that name the vocabulary size are optional and may count tokens
    only."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{fields.file}: the tensor token_embd.weight is missing or is not a matrix")
    return embedding.shape[1]


def _dtype(header: GGUFModel) -> tuple[DType, str | None]:
    """Returns the type to compute in, and the quantisation of most matrix elements (None if they are not quantised)."""
    elements: Counter[GGMLQuantizationType] = Counter()
    for tensor in filter(_is_matrix, header.tensors.values()):
        elements[tensor.quantization] += prod(tensor.shape)
    if not elements:
        return "float32", None
    dominant = elements.most_common(1)[0][0]
    return (_PLAIN[dominant], None) if dominant in _PLAIN else ("bfloat16", dominant.name)


def _is_matrix(tensor: TensorInfo) -> bool:
    return len(tensor.shape) > 1


def _eos(fields: HeaderFields) -> tuple[int, ...]:
    """Returns the ids of the end-of-sequence token and, if a chat model has its own, of the end-of-turn tokens."""
    ids: list[Any] = [fields.whole(f"tokenizer.ggml.{name}_token_id", None) for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(token for token in ids if token is not None))
