"""Rotary (RoPE) frequencies of every supported kind: radians per position of each pair of dimensions.

The values equal those of transformers bit for bit. Sizes refer to the rotated part of a head, `RopeSpec.rotary_dims`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from placement.model.spec import RopeSpec


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    """Return the frequencies, in radians per position, of each rotated pair of dimensions [rotary_dims / 2] fp32, and the
    factor on cos and sin. `head_dim` is used if `spec` does not give rotary_dims.

    If the frequencies depend on the length of the sequence, these are those of a short one. Raises `ValueError` if a kind needs
    the trained context length and `spec` does not give it.
    """
    dims = spec.rotary_dims or head_dim
    frequencies = 1.0 / _waves(spec, dims)
    if spec.kind == "linear":
        return frequencies / spec.factor, 1.0
    if spec.kind == "llama3":
        return _llama3(frequencies, spec), 1.0
    if spec.kind == "yarn":
        return _yarn(spec, dims), _yarn_attention_factor(spec)
    if spec.kind == "longrope":
        return 1.0 / (torch.tensor(spec.short_factor) * _waves(spec, dims)), _longrope_attention_factor(spec)
    return frequencies, 1.0


def long_frequencies(spec: RopeSpec, dims: int) -> Tensor:
    """Return the ``longrope`` frequencies (Ding et al. 2024, arXiv 2402.13753) of sequences beyond the trained length, in
    radians per position [dims / 2] fp32. `dims` is the number of rotated dimensions."""
    return 1.0 / (torch.tensor(spec.long_factor) * _waves(spec, dims))


def dynamic_frequencies(spec: RopeSpec, dims: int, lengths: Tensor) -> Tensor:
    """Return the ``dynamic`` frequencies (NTK-aware scaling, YaRN's appendix A.1), in radians per position [tokens, dims / 2]
    fp32, for tokens in sequences of `lengths` [tokens]. `dims` is the number of rotated dimensions.

    The base grows so that the slowest pair rotates as far over the whole sequence as it did over the trained length. Raises
    `ValueError` if `spec` does not give the trained length.
    """
    original = original_max_position(spec)
    stretched = spec.factor * lengths.clamp(min=original).to(torch.float32) / original - (spec.factor - 1)
    bases = spec.theta * stretched ** (dims / (dims - 2))
    return 1.0 / (bases[:, None] ** (torch.arange(0, dims, 2, dtype=torch.float32, device=lengths.device) / dims))


def _waves(spec: RopeSpec, dims: int) -> Tensor:
    waves: Tensor = spec.theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)
    return waves


def _llama3(frequencies: Tensor, spec: RopeSpec) -> Tensor:
    """Return Llama 3.1 frequencies: long waves are slowed by `factor`, short ones kept, those between blended."""
    original = original_max_position(spec)
    wavelength = 2 * math.pi / frequencies
    slowed = torch.where(wavelength > original / spec.low_freq_factor, frequencies / spec.factor, frequencies)
    smooth = (original / wavelength - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blended = (1 - smooth) * slowed / spec.factor + smooth * slowed
    between = (wavelength >= original / spec.high_freq_factor) & (wavelength <= original / spec.low_freq_factor)
    return torch.where(between, blended, slowed)


def _yarn(spec: RopeSpec, dims: int) -> Tensor:
    """Return YaRN frequencies (Peng et al. 2023, arXiv 2309.00071, section 3.2): slow dimensions are interpolated, fast ones
    kept, with a ramp between."""
    wave = _waves(spec, dims)
    extrapolated, interpolated = 1.0 / wave, 1.0 / (spec.factor * wave)
    low, high = (_yarn_dimension(rotations, spec, dims) for rotations in (spec.beta_fast, spec.beta_slow))
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001  # the ramp must not divide by zero
    ramp = torch.clamp((torch.arange(dims // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return interpolated * (1 - keep) + extrapolated * keep


def _yarn_dimension(rotations: float, spec: RopeSpec, dims: int) -> float:
    """Return the dimension that makes `rotations` rotations over the original context."""
    ratio = original_max_position(spec) / (rotations * 2 * math.pi)
    return dims * math.log(ratio) / (2 * math.log(spec.theta))


def _yarn_attention_factor(spec: RopeSpec) -> float:
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return _mscale(spec.factor, spec.mscale) / _mscale(spec.factor, spec.mscale_all_dim)
    return _mscale(spec.factor, 1.0)


def _longrope_attention_factor(spec: RopeSpec) -> float:
    if spec.attention_factor is not None:
        return spec.attention_factor
    return 1.0 if spec.factor <= 1 else math.sqrt(1 + math.log(spec.factor) / math.log(original_max_position(spec)))


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def original_max_position(spec: RopeSpec) -> int:
    """Return the context length in tokens with which the model was trained. Raises `ValueError` if `spec` does not give it."""
    if spec.original_max_position is None:
        raise ValueError(f"rope kind {spec.kind!r} needs original_max_position (the trained context length); it is not given")
    return spec.original_max_position
