"""RoPE scaling of a GGUF file: ``linear`` and ``yarn`` from its fields, ``llama3`` and ``longrope`` from tensors of divisors.

The converter of llama.cpp stores Llama 3's scaling not as numbers but as the tensor ``rope_freqs.weight``, ``[head_dim / 2]``,
with the divisor of each frequency. The longest waves are divided by the factor itself; the other divisors follow from the two
bounds, which all published models share. Phi-3's scaling is in two such tensors, one for short sequences and one for long ones.
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from placement.checkpoint.directory.header_fields import HeaderFields, made
from placement.checkpoint.gguf.families import ARCHITECTURES
from placement.checkpoint.gguf.split import GGUFModel
from placement.model.spec import ModelError, RopeSpec

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}


def read_ropes(
    path: Path, header: GGUFModel, fields: HeaderFields, family: str, head_dim: int
) -> tuple[RopeSpec, RopeSpec | None]:
    """Returns the RoPE of the full-attention layers, and that of the sliding-window layers if it differs (else None).

    `header` and `fields` are the header of the GGUF file `path`, from which tensors of divisors are read as well. `family` is
    its architecture (a key of `ARCHITECTURES`) and `head_dim` the number of dimensions of a head. Raises `ModelError` if a
    field is missing or not valid, if the scaling is not supported, or if the tensors of divisors do not fit it.
    """
    known = ARCHITECTURES[family]
    rotary_dim = fields.whole(f"{family}.rope.dimension_count", head_dim)
    if rotary_dim != head_dim and not known.partial:
        raise fields.fault(f"{family}.rope.dimension_count", f"the heads have {head_dim} dimensions: all must be rotated")
    names = {"theta": f"{family}.rope.freq_base", "rotary_dims": f"{family}.rope.dimension_count"}
    common = {"rotary_dims": None if rotary_dim == head_dim else rotary_dim, "interleaved": known.interleaved}
    rope = _scaling(path, header, fields, family, rotary_dim)
    rope.setdefault("theta", fields.number(f"{family}.rope.freq_base", 10000.0))
    names["factor"] = "rope_freqs.weight" if rope.get("kind") == "llama3" else f"{family}.rope.scaling.factor"
    whole = made(RopeSpec, path, names, **rope, **common)
    if known.local_theta is None:
        return whole, None
    local_theta = fields.number(f"{family}.rope.freq_base_swa", known.local_theta)
    return whole, made(RopeSpec, path, {"theta": f"{family}.rope.freq_base_swa"}, theta=local_theta, **common)


def _scaling(path: Path, header: GGUFModel, fields: HeaderFields, family: str, rotary_dim: int) -> dict[str, Any]:
    if "rope_freqs.weight" in header.tensors:
        return _llama3(path, header, fields.number(f"{family}.rope.freq_base", 10000.0), rotary_dim)
    if "rope_factors_long.weight" in header.tensors:
        return _longrope(path, header, fields, family, rotary_dim)
    kind = fields.text(f"{family}.rope.scaling.type", "none")
    if kind not in _KINDS:
        raise fields.fault(f"{family}.rope.scaling.type", f"known are {', '.join(_KINDS)}")
    return _KINDS[kind](fields, family)


def _linear(fields: HeaderFields, family: str) -> dict[str, Any]:
    return {"kind": "linear", "factor": fields.number(f"{family}.rope.scaling.factor")}


def _yarn(fields: HeaderFields, family: str) -> dict[str, Any]:
    scaling = f"{family}.rope.scaling"
    for name in (f"{scaling}.attn_factor", f"{scaling}.yarn_attn_factor"):
        if fields.number(name, 1.0) != 1.0:
            raise fields.fault(name, "only 1 is supported yet")
    optional = {
        "original_max_position": fields.whole(f"{scaling}.original_context_length", None),
        "beta_fast": fields.number(f"{scaling}.yarn_beta_fast", None),
        "beta_slow": fields.number(f"{scaling}.yarn_beta_slow", None),
    }
    given = {name: value for name, value in optional.items() if value is not None}
    given.setdefault("original_max_position", fields.whole(f"{family}.context_length"))
    return {"kind": "yarn", "factor": fields.number(f"{scaling}.factor"), **given}


_KINDS: dict[str, Callable[[HeaderFields, str], dict[str, Any]]] = {
    "none": lambda fields, family: {},
    "linear": _linear,
    "yarn": _yarn,
}


def _longrope(path: Path, header: GGUFModel, fields: HeaderFields, family: str, rotary_dim: int) -> dict[str, Any]:
    scaling, context = f"{family}.rope.scaling", fields.whole(f"{family}.context_length")
    original = fields.whole(f"{scaling}.original_context_length", context)
    factors = {
        f"{name}_factor": tuple(map(float, _stored_divisors(path, header, f"rope_factors_{name}.weight", rotary_dim)))
        for name in ("short", "long")
    }
    factor = context / original if original > 0 else 1.0
    attention = fields.number(f"{scaling}.attn_factor", None)
    return {"kind": "longrope", "factor": factor, "original_max_position": original, "attention_factor": attention, **factors}


def llama3_divisors(rope: RopeSpec, head_dim: int) -> np.ndarray:
    """Returns the divisor of each frequency under Llama 3's scaling, ``[head_dim / 2]`` in float64 (Llama 3.1 reference code,
    `apply_scaling`). `rope` has the kind ``llama3``; `head_dim` is the number of rotated dimensions of a head."""
    original = float(rope.original_max_position or 0)
    waves = 2 * pi * rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    smooth = (original / waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = 1 / ((1 - smooth) / rope.factor + smooth)
    short, long = waves < original / rope.high_freq_factor, waves > original / rope.low_freq_factor
    divisors: np.ndarray = np.where(short, 1.0, np.where(long, rope.factor, between))
    return divisors


def _llama3(path: Path, header: GGUFModel, theta: float, rotary_dim: int) -> dict[str, Any]:
    stored = _stored_divisors(path, header, "rope_freqs.weight", rotary_dim)
    given = {"kind": "llama3", "theta": theta, "factor": float(stored[-1]), **_LLAMA3}
    rope = made(RopeSpec, path, {"factor": "rope_freqs.weight"}, **given)
    if not np.allclose(stored, llama3_divisors(rope, rotary_dim), rtol=1e-3):
        raise ModelError(f"{path}: the tensor rope_freqs.weight does not hold Llama 3's rope scaling; no other is known here")
    return given


def _stored_divisors(path: Path, header: GGUFModel, name: str, rotary_dim: int) -> np.ndarray:
    tensor = header.tensors.get(name)
    if tensor is None or tensor.quantization != GGMLQuantizationType.F32 or tensor.shape != (rotary_dim // 2,):
        raise ModelError(f"{path}: the tensor {name} must hold {rotary_dim // 2} numbers of type F32")
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        data = file.read(4 * (rotary_dim // 2))
    if len(data) < 4 * (rotary_dim // 2):
        raise ModelError(f"{tensor.file} is not a whole GGUF file: it ends inside the tensor {name}")
    return np.frombuffer(data, dtype="<f4").astype(np.float64)
