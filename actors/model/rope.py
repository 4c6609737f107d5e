"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), and the ways of stretching it to longer contexts.

Halves are rotated, not neighbours (the Hugging Face weight order)::

    [a | b]  ->  [a cos - b sin | b cos + a sin]          a, b: the two halves of a head

The rotation is done in fp32. Angles are computed once a step from true positions, so a chunk, a prefix hit or another
rank's part of the sequence cannot be given the wrong offset.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from placement.model_spec import RopeSpec


@dataclass(frozen=True)
class Rotation:
    """The angles of one step. `cos` and `sin` are [tokens, 1, head_dim] fp32; the first half of `sin` is negated."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate `x` [tokens, heads, head_dim]; returns its dtype. Rolling by half a head swaps the halves."""
        swapped = x.roll(x.shape[-1] // 2, -1)
        return torch.addcmul(x * self.cos, swapped, self.sin).to(x.dtype)


class Rope:
    """Turns positions into rotations for one head size."""

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device | str = "cpu") -> None:
        inverse, self.attention_factor = inverse_frequencies(spec, head_dim)
        self._inverse_frequencies = inverse.to(device)

    def at(self, positions: Tensor) -> Rotation:
        """The rotation of each of `positions` [tokens] int64, true positions in the sequence."""
        angles = positions.to(torch.float32)[:, None] * self._inverse_frequencies
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return Rotation(torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    """(radians per position [head_dim / 2] fp32, factor on cos and sin): bit-equal to those of transformers."""
    frequencies = 1.0 / (spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if spec.kind == "linear":
        return frequencies / spec.factor, 1.0
    if spec.kind == "llama3":
        return _llama3(frequencies, spec), 1.0
    if spec.kind == "yarn":
        return _yarn(spec, head_dim), _yarn_attention_factor(spec)
    return frequencies, 1.0


def _llama3(frequencies: Tensor, spec: RopeSpec) -> Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between blended."""
    original = _original_max_position(spec)
    wavelength = 2 * math.pi / frequencies
    slowed = torch.where(wavelength > original / spec.low_freq_factor, frequencies / spec.factor, frequencies)
    smooth = (original / wavelength - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blended = (1 - smooth) * slowed / spec.factor + smooth * slowed
    between = (wavelength >= original / spec.high_freq_factor) & (wavelength <= original / spec.low_freq_factor)
    return torch.where(between, blended, slowed)


def _yarn(spec: RopeSpec, head_dim: int) -> Tensor:
    """YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2): interpolate slow dimensions, keep fast ones, ramp between."""
    wave = spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    kept, interpolated = 1.0 / wave, 1.0 / (spec.factor * wave)
    low, high = (_yarn_dimension(rotations, spec, head_dim) for rotations in (spec.beta_fast, spec.beta_slow))
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp must not divide by zero
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return interpolated * (1 - keep) + kept * keep


def _yarn_dimension(rotations: float, spec: RopeSpec, head_dim: int) -> float:
    """The dimension that turns `rotations` times over the original context."""
    turns = _original_max_position(spec) / (rotations * 2 * math.pi)
    return head_dim * math.log(turns) / (2 * math.log(spec.theta))


def _yarn_attention_factor(spec: RopeSpec) -> float:
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return _mscale(spec.factor, spec.mscale) / _mscale(spec.factor, spec.mscale_all_dim)
    return _mscale(spec.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _original_max_position(spec: RopeSpec) -> int:
    if spec.original_max_position is None:
        raise ValueError(f"rope kind {spec.kind!r} needs original_max_position (the trained context length); it is not given")
    return spec.original_max_position
