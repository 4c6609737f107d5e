"""A `ModelSpec` from the header of a GGUF file.

Tied embeddings show as a missing ``output.weight``, biases as the presence of their tensors. A tensor ``rope_freqs.weight``
holds what is left of Llama 3's rope scaling: one divisor per frequency, from which `placement.gguf_rope` tells the numbers.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from placement.gguf_file import GGUFHeader, TensorInfo, is_gguf, read_header
from placement.gguf_rope import read_rope
from placement.header_fields import Fields, made
from placement.model_spec import DType, ModelError, ModelSpec

__all__ = ["is_gguf", "read"]

FAMILIES = {"llama": "none", "qwen2": "none", "qwen3": "head"}
"""``general.architecture`` (Mistral files say llama), and the norm on queries and keys."""

_PLAIN: dict[GGMLQuantizationType, DType] = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}


def read(path: Path) -> ModelSpec:
    """The model in a GGUF file. Raises `ModelError`, which names the file and the field at fault."""
    header = read_header(path)
    fields = Fields(path, header.fields)
    family = fields.text("general.architecture")
    if family not in FAMILIES:
        raise fields.fault("general.architecture", f"the architectures known here are {', '.join(FAMILIES)}")
    _refuse_experts(fields, family)
    return _spec(path, header, fields, family)


def _spec(path: Path, header: GGUFHeader, fields: Fields, family: str) -> ModelSpec:
    names = _names(family)
    num_heads, hidden_size = fields.whole(names["num_heads"]), fields.whole(names["hidden_size"])
    num_layers = fields.num_layers(names["num_layers"])
    head_dim = fields.whole(names["head_dim"], hidden_size // num_heads if num_heads > 0 else 0)
    if fields.whole(f"{family}.attention.value_length", head_dim) != head_dim:
        raise fields.fault(f"{family}.attention.value_length", f"{names['head_dim']} is {head_dim}: they must be equal")
    dtype, quantization = _dtype(header)
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
        max_position=fields.whole(names["max_position"]),
        norm_eps=fields.number(names["norm_eps"]),
        qkv_bias="blk.0.attn_q.bias" in header.tensors,
        o_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_down.bias" in header.tensors,
        qk_norm=FAMILIES[family],
        tie_embeddings="output.weight" not in header.tensors,
        windows=(fields.whole(f"{family}.attention.sliding_window", None),) * num_layers,
        rope=read_rope(path, header, fields, family, head_dim),
        dtype=dtype,
        quantization=quantization,
        bos_token_id=fields.whole("tokenizer.ggml.bos_token_id", None),
        eos_token_ids=_eos(fields),
    )


def _names(family: str) -> dict[str, str]:
    """Fields of `ModelSpec` and their names in the file."""
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


def _refuse_experts(fields: Fields, family: str) -> None:
    if fields.whole(f"{family}.expert_count", 0):
        raise fields.fault(f"{family}.expert_count", "mixtures of experts are not supported yet")


def _vocab_size(header: GGUFHeader, fields: Fields, family: str) -> int:
    """Rows of the embedding: the fields that name the size are optional and may count tokens only."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{fields.file}: the tensor token_embd.weight is missing or is not a matrix")
    return embedding.shape[1]


def _dtype(header: GGUFHeader) -> tuple[DType, str | None]:
    """Type to compute in, and the quantisation that most elements of the matrices have (None if they are plain)."""
    elements: Counter[GGMLQuantizationType] = Counter()
    for tensor in filter(_is_matrix, header.tensors.values()):
        elements[tensor.quantization] += prod(tensor.shape)
    if not elements:
        return "float32", None
    dominant = elements.most_common(1)[0][0]
    return (_PLAIN[dominant], None) if dominant in _PLAIN else ("bfloat16", dominant.name)


def _is_matrix(tensor: TensorInfo) -> bool:
    return len(tensor.shape) > 1


def _eos(fields: Fields) -> tuple[int, ...]:
    """End of sequence, and end of turn where a chat model has one of its own."""
    ids: list[Any] = [fields.whole(f"tokenizer.ggml.{name}_token_id", None) for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(token for token in ids if token is not None))
