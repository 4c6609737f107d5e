"""Reads a `ModelSpec` from the ``config.json`` of a Hugging Face folder.

Absent fields get the defaults of the architecture (`placement.checkpoint.hf.families`).
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from placement.checkpoint.directory.header_fields import HeaderFields, made
from placement.checkpoint.directory.text_file import read_text
from placement.checkpoint.directory.tied_head import is_tied
from placement.checkpoint.hf.families import ACTIVATIONS, FAMILIES, TEXT_FAMILY, Family
from placement.checkpoint.hf.heads import read_heads
from placement.checkpoint.hf.mla import read_mla, scores_scale
from placement.checkpoint.hf.moe import read_moe
from placement.checkpoint.hf.rope import read_ropes
from placement.checkpoint.hf.safetensors_file import read_directory
from placement.checkpoint.hf.windows import read_unrotated, read_windows
from placement.model.spec import DTYPE_BYTES, ModelError, ModelSpec

log = logging.getLogger("shardwright.checkpoint")

_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "window_kv_heads": "swa_num_key_value_heads",
    "value_dim": "v_head_dim",
    "value_scale": "attention_value_scale",
    "max_position": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "rope": "rope_parameters",
    "windows": "sliding_window",
}
"""Fields of `ModelSpec` that have another name in config.json."""


def read(folder: Path) -> ModelSpec:
    """Returns the specification of the model in a Hugging Face folder, from its ``config.json``, the end tokens in its
    ``generation_config.json``, for some MoE models the tensor names, and for tied embeddings whether the LM head in the files,
    if there is one, equals the embedding. Raises `ModelError` if a file is absent or is not a
    JSON object, if the architecture, a quantisation or an option is not supported, or if a field is missing or not valid."""
    top = _load(folder / "config.json")
    if top.values.get("quantization_config") is not None:
        method = top.values["quantization_config"]
        method = method.get("quant_method", method) if isinstance(method, dict) else method
        raise ModelError(f"{top.file}: quantization_config ({method}) is not supported yet: use an unquantised checkpoint")
    config = _decoder(top)
    family = FAMILIES.get(config.text("model_type"))
    if family is None:
        raise config.fault("model_type", f"the architectures known here are {', '.join(FAMILIES)}")
    return _spec(HeaderFields(config.file, {**family.sizes, **config.values}), family, folder, top)


def _spec(config: HeaderFields, family: Family, folder: Path, top: HeaderFields) -> ModelSpec:
    num_heads = config.whole("num_attention_heads")
    num_layers = config.num_layers("num_hidden_layers")
    mla = read_mla(config, family, num_heads)
    head_dim = _head_dim(config, family, num_heads) if mla is None else mla.query_dim
    attention_bias = config.flag(family.bias_field, family.attention_bias)
    max_position = config.whole("max_position_embeddings", family.max_position)
    windows = read_windows(config, family, num_layers)
    num_kv_heads = 1 if mla else _num_kv_heads(config, family, num_heads)
    rope, local_rope = read_ropes(config, family, mla.rope_dim if mla else head_dim, max_position)
    return made(
        ModelSpec,
        config.file,
        _NAMES,
        family=config.text("model_type"),
        hidden_size=config.whole("hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=config.whole("intermediate_size"),
        vocab_size=config.whole("vocab_size"),
        max_position=rope.context_length(max_position),
        norm_eps=config.number("rms_norm_eps", config.number("layernorm_epsilon", family.norm_eps)),
        activation=_activation(config, family),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=config.flag("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias,
        moe=read_moe(config, family.moe, num_layers),
        mtp_layers=config.whole("num_nextn_predict_layers", config.whole("num_mtp_layers", family.mtp_layers)),
        qk_norm=_qk_norm(config, family),
        norms=family.norms,
        fused_qkv=family.fused_qkv,
        fused_gate_up=family.fused_gate_up,
        tie_embeddings=_is_tied(config, family, folder),
        windows=windows,
        rope=rope,
        local_rope=local_rope,
        unrotated_layers=read_unrotated(config, family, num_layers),
        dtype=_dtype(config, top),
        bos_token_id=_bos(config, top, family),
        eos_token_ids=_eos(config, top, family, folder),
        **read_heads(config, family, head_dim, num_kv_heads, windows),
        **({"mla": mla, "attention_scale": scores_scale(mla, rope)} if mla else {}),
        **(_gemma(config, family) if family.gemma else {}),
    )


def _gemma(config: HeaderFields, family: Family) -> dict[str, Any]:
    if config.flag("use_bidirectional_attention", False):
        raise config.fault("use_bidirectional_attention", "only models that look back are supported")
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    attention, logits = (
        config.number(name, None if name in config.values else cap) for name, cap in zip(names, family.caps, strict=True)
    )
    scalar = config.number("query_pre_attn_scalar", 256.0)
    if scalar <= 0:
        raise config.fault("query_pre_attn_scalar", "must be more than 0")
    return {
        "norm_offset": 1.0,
        "embedding_scale": config.whole("hidden_size") ** 0.5,
        "attention_scale": scalar**-0.5,
        "attention_softcap": attention,
        "logit_softcap": logits,
    }


def _qk_norm(config: HeaderFields, family: Family) -> str:
    """Returns the query and key normalisation: the family's, or for families with an optional one, the file's."""
    if family.qk_norm != "optional":
        return family.qk_norm
    return "head" if config.flag("use_qk_norm", False) else "none"


def _is_tied(config: HeaderFields, family: Family, folder: Path) -> bool:
    """Whether the LM head is the embedding: as config.json says, unless the files hold another head. A folder without weights
    serves for planning only, and a damaged one is refused when it is loaded."""
    if not config.flag("tie_word_embeddings", family.tied):
        return False
    with suppress(ModelError, OSError):
        if not is_tied(read_directory(folder)):
            message = "%s: tie_word_embeddings is true, but lm_head.weight differs from the embedding and is used as it is"
            log.warning(message, config.file)
            return False
    return True


def _activation(config: HeaderFields, family: Family) -> str:
    """Returns the activation of the MLP. Gemma's field is ``hidden_activation``; a ``hidden_act`` beside it has no effect."""
    field = "hidden_activation" if family.gemma else "hidden_act"
    given = config.text(field, family.activation)
    if given not in ACTIVATIONS:
        raise config.fault(field, f"must be one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[given]


def _load(file: Path) -> HeaderFields:
    try:
        values = json.loads(read_text(file))
    except FileNotFoundError:
        raise ModelError(f"{file.parent} has no {file.name}, so it is not a Hugging Face model folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{file} must hold a JSON object, but holds a {type(values).__name__}")
    return HeaderFields(file, values)


def _decoder(top: HeaderFields) -> HeaderFields:
    """Returns the fields that describe the decoder. Multimodal models nest them; ``tie_word_embeddings`` may still be in the
    outer part, and a missing ``model_type`` follows from the outer one."""
    nested = top.group("text_config")
    if nested is None:
        return top
    outer = {name: top.values[name] for name in ("tie_word_embeddings",) if name in top.values}
    implied = TEXT_FAMILY.get(top.text("model_type", ""))
    family = {} if implied is None else {"model_type": implied}
    return HeaderFields(top.file, {**outer, **family, **nested.values})


def _num_kv_heads(config: HeaderFields, family: Family, num_heads: int) -> int:
    if "num_key_value_heads" in config.values:
        return int(config.whole("num_key_value_heads", num_heads))
    return family.num_kv_heads or num_heads


def _head_dim(config: HeaderFields, family: Family, num_heads: int) -> int:
    given = config.whole("head_dim", family.head_dim)
    if given is not None:
        return int(given)
    if num_heads < 1 or config.whole("hidden_size") % num_heads:
        raise config.fault(
            "num_attention_heads", f"must divide hidden_size={config.whole('hidden_size')} (no head_dim is given)"
        )
    return int(config.whole("hidden_size")) // num_heads


def _dtype(config: HeaderFields, top: HeaderFields) -> str:
    """Returns ``dtype`` (transformers 5) or ``torch_dtype``; float32, torch's default, if neither is given."""
    for fields in (config, top):
        for name in ("dtype", "torch_dtype"):
            given = fields.text(name, None)
            if given is not None:
                if given.removeprefix("torch.") not in DTYPE_BYTES:
                    raise fields.fault(name, f"must be one of {', '.join(DTYPE_BYTES)}")
                return str(given.removeprefix("torch."))
    return "float32"


def _bos(config: HeaderFields, top: HeaderFields, family: Family) -> int | None:
    """Returns the start token of the decoder, or of the outer part of config.json; the family's if both are silent."""
    for fields in (config, top):
        if fields.values.get("bos_token_id") is not None:
            return int(fields.whole("bos_token_id"))
    return None if _mentions("bos_token_id", config, top) else family.bos_token_id


def _eos(config: HeaderFields, top: HeaderFields, family: Family, folder: Path) -> tuple[int, ...]:
    """Returns the end tokens of config.json (of the decoder and of the outer part), and those that generation_config.json adds
    (chat models name more there). The family's are for files that name none."""
    ids = config.token_ids("eos_token_id") + top.token_ids("eos_token_id")
    extra = folder / "generation_config.json"
    if extra.exists():
        ids += _load(extra).token_ids("eos_token_id")
    if not ids and not _mentions("eos_token_id", config, top):
        ids = family.eos_token_ids
    return tuple(dict.fromkeys(ids))


def _mentions(field: str, *parts: HeaderFields) -> bool:
    """Returns whether any of `parts` has the field, even as null, which means that there is no such token."""
    return any(field in part.values for part in parts)
