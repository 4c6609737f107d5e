"""RoPE parameters from ``config.json``, by the rules of transformers' ``standardize_rope_params``.

Both spellings are read: ``rope_scaling`` with a ``rope_theta`` beside it, and ``rope_parameters``, which also holds the theta
and may be nested by kind of layer::

    "rope_parameters": {"full_attention": {"rope_type": ..., "rope_theta": 1e6}, "sliding_attention": {...}}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from placement.checkpoint.directory.header_fields import NOT_GIVEN, HeaderFields, made
from placement.checkpoint.hf.families import Family
from placement.model.spec import ModelError, RopeSpec

_NAMES = {"theta": "rope_theta", "original_max_position": "original_max_position_embeddings"}


def read_ropes(config: HeaderFields, family: Family, head_dim: int, max_position: int) -> tuple[RopeSpec, RopeSpec | None]:
    """Returns the RoPE of the full-attention layers, and that of the sliding-window layers if it differs (else None).

    `config` has the fields of config.json, `family` the defaults of its architecture. `head_dim` is the number of dimensions of
    a head that RoPE applies to, `max_position` the model's context length in tokens. Raises `ModelError` if the RoPE type, or
    partial rotation in this family, is not supported, or if a field is missing or not valid.
    """
    nested = config.group("rope_parameters") or HeaderFields(config.file, dict(family.rope))
    whole, local = nested.group("full_attention"), nested.group("sliding_attention")
    scaling = config.group("rope_scaling")
    if scaling is None or not scaling.values:
        scaling = HeaderFields(config.file, {}) if whole or local else nested
    if whole is not None:
        scaling = HeaderFields(config.file, {**whole.values, **scaling.values})
    rope = _rope(config, scaling, family, head_dim, max_position)
    if local is None and family.local_theta is None:
        return rope, None
    local_theta = config.number("rope_local_base_freq", config.number("swa_rope_theta", family.local_theta or family.theta))
    local = HeaderFields(config.file, {"rope_theta": local_theta, **(local.values if local else {})})
    return rope, _rope(config, local, family, head_dim, max_position)


def _rope(config: HeaderFields, rope: HeaderFields, family: Family, head_dim: int, max_position: int) -> RopeSpec:
    kind = rope.text("rope_type", rope.text("type", "default"))
    kind = "longrope" if kind in family.rope_aliases else kind
    if kind not in _SCALINGS:
        raise ModelError(f"{config.file}: rope_type {kind!r} is not supported yet; known are {', '.join(_SCALINGS)}")
    theta = rope.number("rope_theta", config.number("rope_theta", family.theta))
    return made(
        RopeSpec,
        config.file,
        _NAMES,
        kind=kind,
        theta=theta,
        rotary_dims=_rotary_dims(config, rope, family, head_dim),
        interleaved=config.flag("rope_interleave", True) if family.interleaved is None else family.interleaved,
        **_SCALINGS[kind](config, rope, max_position, family),
    )


def _rotary_dims(config: HeaderFields, rope: HeaderFields, family: Family, head_dim: int) -> int | None:
    given = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", family.partial_rotary_factor))
    if given is None or given == 1:
        return None
    if family.partial_rotary_factor is None:
        kind = config.text("model_type")
        raise ModelError(f"{config.file}: partial_rotary_factor is {given}, but {kind} models rotate whole heads (1)")
    return int(head_dim * given)


def _linear(config: HeaderFields, rope: HeaderFields, max_position: int, family: Family) -> dict[str, Any]:
    return {"factor": rope.number("factor")}


def _dynamic(config: HeaderFields, rope: HeaderFields, max_position: int, family: Family) -> dict[str, Any]:
    return {"factor": rope.number("factor"), "original_max_position": max_position}


def _llama3(config: HeaderFields, rope: HeaderFields, max_position: int, family: Family) -> dict[str, Any]:
    return {
        "original_max_position": _original(config, rope, max_position, family),
        **{name: rope.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor")},
    }


def _yarn(config: HeaderFields, rope: HeaderFields, max_position: int, family: Family) -> dict[str, Any]:
    original = _original(config, rope, max_position, family)
    # A factor of null, unlike an absent one, stands for the ratio of the two context lengths.
    implied = max_position / original if "factor" in rope.values and original > 0 else NOT_GIVEN
    optional = {name: rope.number(name, None) for name in _YARN_OPTIONS}
    return {
        "original_max_position": original,
        "factor": rope.number("factor", implied),
        "truncate": rope.flag("truncate", True),
        **{name: value for name, value in optional.items() if value is not None},
    }


def _longrope(config: HeaderFields, rope: HeaderFields, max_position: int, family: Family) -> dict[str, Any]:
    original = _original(config, rope, max_position, family)
    return {
        "original_max_position": original,
        "factor": rope.number("factor", max_position / original if original > 0 else NOT_GIVEN),
        "attention_factor": rope.number("attention_factor", None),
        **{name: rope.numbers(name) for name in ("short_factor", "long_factor")},
    }


def _original(config: HeaderFields, rope: HeaderFields, max_position: int, family: Family) -> int:
    """Returns the context length of the training. If both the model and its RoPE name one, the model's is used."""
    inner = rope.whole("original_max_position_embeddings", family.original_max_position or max_position)
    return int(config.whole("original_max_position_embeddings", inner))


_YARN_OPTIONS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
_SCALINGS: dict[str, Callable[[HeaderFields, HeaderFields, int, Family], dict[str, Any]]] = {
    "default": lambda config, rope, max_position, family: {},
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "dynamic": _dynamic,
}
"""Readers of the RoPE types. Each returns the type's fields of `RopeSpec`, without the theta."""
