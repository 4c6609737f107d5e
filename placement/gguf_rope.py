"""Rope scaling of a GGUF file: ``linear`` and ``yarn`` from its fields, ``llama3`` from the tensor of divisors.

The converter of llama.cpp stores Llama 3's scaling not as numbers but as ``rope_freqs.weight``, ``[head_dim / 2]``: what each
frequency is divided by. The longest waves are divided by the factor itself; the rest follows from the two bounds,
which all published models share.
"""

from __future__ import annotations

from math import pi
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType

from placement.gguf_file import GGUFHeader
from placement.header_fields import Fields, made
from placement.model_spec import ModelError, RopeSpec

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}


def read_rope(path: Path, header: GGUFHeader, fields: Fields, family: str, head_dim: int) -> RopeSpec:
    """The rope of a file. Raises `ModelError` on a scaling that is not known here."""
    theta = fields.number(f"{family}.rope.freq_base", 10000.0)
    turned = fields.whole(f"{family}.rope.dimension_count", head_dim)
    if turned != head_dim:
        raise fields.fault(f"{family}.rope.dimension_count", f"the heads have {head_dim} dimensions: all must be turned")
    if "rope_freqs.weight" in header.tensors:
        return _llama3(path, header, theta, head_dim)
    scaling = f"{family}.rope.scaling"
    kind = fields.text(f"{scaling}.type", "none")
    if kind == "none":
        return made(RopeSpec, path, {"theta": f"{family}.rope.freq_base"}, theta=theta)
    factor = fields.number(f"{scaling}.factor")
    if kind == "linear":
        return made(RopeSpec, path, {"factor": f"{scaling}.factor"}, kind="linear", theta=theta, factor=factor)
    if kind != "yarn":
        raise fields.fault(f"{scaling}.type", "known are none, linear and yarn")
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
    return made(RopeSpec, path, {}, kind="yarn", theta=theta, factor=factor, **given)


def llama3_divisors(rope: RopeSpec, head_dim: int) -> np.ndarray:
    """What Llama 3's scaling divides each frequency by, ``[head_dim / 2]`` (Llama 3.1 reference code, `apply_scaling`)."""
    original = float(rope.original_max_position or 0)
    waves = 2 * pi * rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    smooth = (original / waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = 1 / ((1 - smooth) / rope.factor + smooth)
    short, long = waves < original / rope.high_freq_factor, waves > original / rope.low_freq_factor
    divisors: np.ndarray = np.where(short, 1.0, np.where(long, rope.factor, between))
    return divisors


def _llama3(path: Path, header: GGUFHeader, theta: float, head_dim: int) -> RopeSpec:
    stored = _stored_divisors(path, header, head_dim)
    rope = made(
        RopeSpec, path, {"factor": "rope_freqs.weight"}, kind="llama3", theta=theta, factor=float(stored[-1]), **_LLAMA3
    )
    if not np.allclose(stored, llama3_divisors(rope, head_dim), rtol=1e-3):
        raise ModelError(f"{path}: the tensor rope_freqs.weight does not hold Llama 3's rope scaling; no other is known here")
    return rope


def _stored_divisors(path: Path, header: GGUFHeader, head_dim: int) -> np.ndarray:
    tensor = header.tensors["rope_freqs.weight"]
    if tensor.quantization != GGMLQuantizationType.F32 or tensor.shape != (head_dim // 2,):
        raise ModelError(f"{path}: the tensor rope_freqs.weight must hold {head_dim // 2} numbers of type F32")
    with path.open("rb") as file:
        file.seek(header.data_start + tensor.offset)
        data = file.read(4 * (head_dim // 2))
    if len(data) < 4 * (head_dim // 2):
        raise ModelError(f"{path} is not a whole GGUF file: it ends inside the tensor rope_freqs.weight")
    return np.frombuffer(data, dtype="<f4").astype(np.float64)
