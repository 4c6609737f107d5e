"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), and the ways of stretching it to longer contexts.

Halves are rotated (the Hugging Face weight order), or neighbours where a model was trained so::

    [a | b]          ->  [a cos - b sin | b cos + a sin]          a, b: the two halves of a head
    [a0 b0 a1 b1 .]  ->  [a0 cos - b0 sin, b0 cos + a0 sin, .]    interleaved

The rotation is done in fp32. Angles are computed once a step from true positions, so a chunk, a prefix hit or another
rank's part of the sequence cannot be given the wrong offset.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from actors.model.step.batch import Batch
from actors.model.step.rope_frequencies import dynamic_frequencies, inverse_frequencies, long_frequencies, original_max_position
from placement.model.spec import RopeSpec

Rotate = Callable[[Tensor], Tensor]
"""Rotates [tokens, heads, head_dim] by the angles of one step; returns its dtype."""


@dataclass(frozen=True)
class Rotation:
    """The angles of one step. `cos` and `sin` are [tokens, 1, head_dim] fp32; the first half of `sin` is negated."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate `x` [tokens, heads, head_dim]; returns its dtype. Rolling by half a head swaps the halves."""
        swapped = x.roll(x.shape[-1] // 2, -1)
        return torch.addcmul(x * self.cos, swapped, self.sin).to(x.dtype)


@dataclass(frozen=True)
class PairRotation:
    """As `Rotation` where neighbours are rotated together; every other element of `sin`, from the first, is negated."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate `x` [tokens, heads, head_dim]; returns its dtype."""
        swapped = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).flip(-1).flatten(-2)
        return torch.addcmul(x * self.cos, swapped, self.sin).to(x.dtype)


@dataclass(frozen=True)
class PartialRotation:
    """Rotates the first `dims` dimensions of each head and leaves the others."""

    inner: Rotate
    dims: int

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate `x` [tokens, heads, head_dim]; returns its dtype."""
        return torch.cat((self.inner(x[..., : self.dims]), x[..., self.dims :]), -1)


class StepRope(Protocol):
    """Makes the rotation of a step."""

    def of(self, batch: Batch) -> Rotate:
        """The rotation of every token of `batch`."""


class NoRope:
    """The rope of layers that have none."""

    def of(self, batch: Batch) -> Rotate:
        return _unrotated


class Rope:
    """Makes rotations of positions for one head size."""

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device | str = "cpu") -> None:
        inverse, self.attention_factor = inverse_frequencies(spec, head_dim)
        self._inverse_frequencies = inverse.to(device)
        self._rotation = _neighbours if spec.interleaved else _halves
        self._dims, self._head_dim = spec.rotary_dims or head_dim, head_dim

    def of(self, batch: Batch) -> Rotate:
        return self.at(batch.positions)

    def at(self, positions: Tensor) -> Rotate:
        """The rotation of each of `positions` [tokens] int64, true positions in the sequence."""
        return self._rotation_by(positions.to(torch.float32)[:, None] * self._inverse_frequencies)

    def _rotation_by(self, angles: Tensor) -> Rotate:
        """The rotation by `angles` [tokens, rotary_dims / 2] radians."""
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        rotate = self._rotation(cos, sin)
        return rotate if self._dims == self._head_dim else PartialRotation(rotate, self._dims)


class LengthRope(Rope, ABC):
    """A rope whose frequencies depend on the length of the sequence.

    In transformers it is the longest sequence of the batch, as far as it has been run, that decides: an answer would depend
    on its neighbours and on the size of the chunks. Here each token has a length of its own, known from the start,

        length(token at position p of a sequence) = max(deciding length of the sequence, p + 1)

    where the deciding length (`RopeSpec.deciding_length`) comes with the sequence. Keys are never rotated anew; sequences of
    unlike `RopeSpec.length_class` share none.
    """

    def of(self, batch: Batch) -> Rotate:
        lengths, counts = (
            torch.tensor(lens, dtype=torch.int64, device=batch.positions.device) for lens in (batch.rope_lens, batch.query_lens)
        )
        lengths = lengths.repeat_interleave(counts)
        return self.in_sequences(batch.positions, torch.maximum(lengths, batch.positions + 1))

    def in_sequences(self, positions: Tensor, lengths: Tensor) -> Rotate:
        """The rotation of each of `positions` in a sequence as long as its entry of `lengths` [tokens] says."""
        return self._rotation_by(positions.to(torch.float32)[:, None] * self._frequencies(lengths))

    @abstractmethod
    def _frequencies(self, lengths: Tensor) -> Tensor:
        """Radians per position, [tokens, rotary_dims / 2]."""


class LongRope(LengthRope):
    """Two sets of frequencies: one up to the trained length, one beyond it (Ding et al. 2024, arXiv 2402.13753)."""

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device | str = "cpu") -> None:
        super().__init__(spec, head_dim, device)
        self._long = long_frequencies(spec, self._dims).to(device)
        self._original = original_max_position(spec)

    def _frequencies(self, lengths: Tensor) -> Tensor:
        return torch.where((lengths > self._original)[:, None], self._long, self._inverse_frequencies)


class DynamicRope(LengthRope):
    """Frequencies for every length beyond the trained one (`dynamic_frequencies`)."""

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device | str = "cpu") -> None:
        super().__init__(spec, head_dim, device)
        self._spec = spec

    def _frequencies(self, lengths: Tensor) -> Tensor:
        return dynamic_frequencies(self._spec, self._dims, lengths)


_KINDS: dict[str, type[Rope]] = {"longrope": LongRope, "dynamic": DynamicRope}


def make_rope(spec: RopeSpec | None, head_dim: int, device: torch.device | str = "cpu") -> StepRope:
    """The rope of some layers; `spec` is that of `ModelSpec.rope_of`."""
    if spec is None:
        return NoRope()
    return _KINDS.get(spec.kind, Rope)(spec, head_dim, device)


def _halves(cos: Tensor, sin: Tensor) -> Rotate:
    return Rotation(torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])


def _neighbours(cos: Tensor, sin: Tensor) -> Rotate:
    return PairRotation(torch.stack((cos, cos), -1).flatten(-2)[:, None], torch.stack((-sin, sin), -1).flatten(-2)[:, None])


def _unrotated(x: Tensor) -> Tensor:
    return x
