"""A `ModelSpec` from the ``config.json`` of a Hugging Face folder.

Absent fields get the defaults of the architecture's config class in transformers 5.24. Both spellings of the rope keys
are read: ``rope_scaling`` with a ``rope_theta`` beside it, and ``rope_parameters``, which holds the theta too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from placement.header_fields import NOT_GIVEN, Fields, made
from placement.model_spec import DTYPE_BYTES, ModelError, ModelSpec, RopeSpec


@dataclass(frozen=True)
class _Family:
    """What an architecture assumes where config.json is silent."""

    max_position: int
    num_kv_heads: int | None
    """None: as many as query heads."""
    head_dim: int | None = None
    """None: ``hidden_size / num_attention_heads``."""
    qkv_bias: bool | None = None
    """None: as ``attention_bias`` says, for the output projection too."""
    mlp_bias: bool | None = False
    """None: as ``mlp_bias`` says."""
    qk_norm: str = "none"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


FAMILIES = {
    "llama": _Family(2048, None, mlp_bias=None, bos_token_id=1, eos_token_ids=(2,)),
    "mistral": _Family(131072, 8, qkv_bias=False, bos_token_id=1, eos_token_ids=(2,)),
    "qwen2": _Family(32768, 32, qkv_bias=True),
    "qwen3": _Family(32768, 32, head_dim=128, qk_norm="head"),
}

_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_position": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "rope": "rope_parameters",
    "windows": "sliding_window",
}
"""Fields of `ModelSpec` whose name in config.json is another."""

_ROPE_NAMES = {"theta": "rope_theta", "original_max_position": "original_max_position_embeddings"}


def read(folder: Path) -> ModelSpec:
    """The model in a folder with a ``config.json``. Raises `ModelError`."""
    top = _load(folder / "config.json")
    if top.values.get("quantization_config") is not None:
        method = top.values["quantization_config"]
        method = method.get("quant_method", method) if isinstance(method, dict) else method
        raise ModelError(f"{top.file}: quantization_config ({method}) is not supported yet: use an unquantised checkpoint")
    config = _decoder(top)
    family = FAMILIES.get(config.text("model_type"))
    if family is None:
        raise config.fault("model_type", f"the architectures known here are {', '.join(FAMILIES)}")
    return _spec(config, family, folder, top)


def _spec(config: Fields, family: _Family, folder: Path, top: Fields) -> ModelSpec:
    num_heads = config.whole("num_attention_heads")
    num_layers = config.num_layers("num_hidden_layers")
    attention_bias = config.flag("attention_bias", False)
    max_position = config.whole("max_position_embeddings", family.max_position)
    return made(
        ModelSpec,
        config.file,
        _NAMES,
        family=config.text("model_type"),
        hidden_size=config.whole("hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, family, num_heads),
        head_dim=_head_dim(config, family, num_heads),
        intermediate_size=config.whole("intermediate_size"),
        vocab_size=config.whole("vocab_size"),
        max_position=max_position,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        activation=config.text("hidden_act", "silu"),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.qkv_bias is None else False,
        mlp_bias=config.flag("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        tie_embeddings=config.flag("tie_word_embeddings", False),
        windows=_windows(config, num_layers),
        rope=_rope(config, max_position),
        dtype=_dtype(config, top),
        bos_token_id=config.whole("bos_token_id", None if "bos_token_id" in config.values else family.bos_token_id),
        eos_token_ids=_eos(config, family, folder),
    )


def _load(file: Path) -> Fields:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file.parent} has no {file.name}, so it is not a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{file} must hold a JSON object, but holds a {type(values).__name__}")
    return Fields(file, values)


def _decoder(top: Fields) -> Fields:
    """The part that describes the decoder: nested in multi-modal models, where the outer part may still say it is tied."""
    nested = top.group("text_config")
    if nested is None:
        return top
    outer = {name: top.values[name] for name in ("tie_word_embeddings",) if name in top.values}
    return Fields(top.file, {**outer, **nested.values})


def _num_kv_heads(config: Fields, family: _Family, num_heads: int) -> int:
    if "num_key_value_heads" in config.values:
        return int(config.whole("num_key_value_heads", num_heads))
    return family.num_kv_heads or num_heads


def _head_dim(config: Fields, family: _Family, num_heads: int) -> int:
    given = config.whole("head_dim", family.head_dim)
    if given is not None:
        return int(given)
    if num_heads < 1 or config.whole("hidden_size") % num_heads:
        raise config.fault(
            "num_attention_heads", f"must divide hidden_size={config.whole('hidden_size')} (no head_dim is given)"
        )
    return int(config.whole("hidden_size")) // num_heads


def _windows(config: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Mistral slides on every layer; Qwen only if told to, on the layers from ``max_window_layers`` on."""
    family = config.text("model_type")
    if family == "llama":
        return (None,) * num_layers
    absent = 4096 if "sliding_window" not in config.values else None
    window = config.whole("sliding_window", absent)
    if family == "mistral":
        return (window,) * num_layers
    if not config.flag("use_sliding_window", False):
        window = None
    kinds = config.texts("layer_types")
    if kinds is None:
        first = config.whole("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return _windows_of_kinds(config, kinds, window, num_layers)


def _windows_of_kinds(config: Fields, kinds: list[str], window: int | None, num_layers: int) -> tuple[int | None, ...]:
    known = {"full_attention": None, "sliding_attention": window}
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        raise ModelError(f"{config.file}: layer_types names {', '.join(unknown)}; known are {', '.join(known)}")
    if len(kinds) != num_layers:
        raise ModelError(f"{config.file}: layer_types names {len(kinds)} layers, but num_hidden_layers is {num_layers}")
    if window is None and "sliding_attention" in kinds:
        raise ModelError(f"{config.file}: layer_types has sliding_attention, but sliding_window is not set (or not used)")
    return tuple(known[kind] for kind in kinds)


def _rope(config: Fields, max_position: int) -> RopeSpec:
    """The scaling applied to rotary embedding; the rules of transformers' ``standardize_rope_params``."""
    rope = config.group("rope_scaling")
    rope = rope if rope is not None and rope.values else config.group("rope_parameters")
    rope = rope or Fields(config.file, {})
    if config.number("partial_rotary_factor", rope.number("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"{config.file}: partial_rotary_factor is not supported yet")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in _SCALINGS:
        raise ModelError(f"{config.file}: rope_type {kind!r} is not supported yet; known are {', '.join(_SCALINGS)}")
    theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    return made(RopeSpec, config.file, _ROPE_NAMES, kind=kind, theta=theta, **_SCALINGS[kind](config, rope, max_position))


def _linear(config: Fields, rope: Fields, max_position: int) -> dict[str, Any]:
    return {"factor": rope.number("factor")}


def _llama3(config: Fields, rope: Fields, max_position: int) -> dict[str, Any]:
    return {
        "original_max_position": _original(config, rope, max_position),
        **{name: rope.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor")},
    }


def _yarn(config: Fields, rope: Fields, max_position: int) -> dict[str, Any]:
    original = _original(config, rope, max_position)
    # A factor of null, unlike an absent one, stands for the ratio of the two context lengths.
    implied = max_position / original if "factor" in rope.values and original > 0 else NOT_GIVEN
    optional = {name: rope.number(name, None) for name in _YARN_OPTIONS}
    return {
        "original_max_position": original,
        "factor": rope.number("factor", implied),
        "truncate": rope.flag("truncate", True),
        **{name: value for name, value in optional.items() if value is not None},
    }


def _original(config: Fields, rope: Fields, max_position: int) -> int:
    """Context length of the training; where both the model and its rope name one, the model's counts."""
    inner = rope.whole("original_max_position_embeddings", max_position)
    return int(config.whole("original_max_position_embeddings", inner))


_YARN_OPTIONS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
_SCALINGS: dict[str, Callable[[Fields, Fields, int], dict[str, Any]]] = {
    "default": lambda config, rope, max_position: {},
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""What each rope type takes from the file, beside the theta."""


def _dtype(config: Fields, top: Fields) -> str:
    """``dtype`` (transformers 5) or ``torch_dtype``; float32, torch's default, if neither is given."""
    for fields in (config, top):
        for name in ("dtype", "torch_dtype"):
            given = fields.text(name, None)
            if given is not None:
                if given.removeprefix("torch.") not in DTYPE_BYTES:
                    raise fields.fault(name, f"must be one of {', '.join(DTYPE_BYTES)}")
                return str(given.removeprefix("torch."))
    return "float32"


def _eos(config: Fields, family: _Family, folder: Path) -> tuple[int, ...]:
    """End tokens of config.json, and those generation_config.json adds (chat models name more there)."""
    ids = config.token_ids("eos_token_id")
    if "eos_token_id" not in config.values:
        ids = family.eos_token_ids
    extra = folder / "generation_config.json"
    if extra.exists():
        ids += _load(extra).token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))
