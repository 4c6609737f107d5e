"""Rotary position embedding (RoPE; Su et al. 2021, arXiv 2104.09864), and its extensions to longer contexts.

The two halves of a head are rotated together (the Hugging Face weight order), or neighbouring elements if the model was trained
that way::

    [a | b]          ->  [a cos - b sin | b cos + a sin]          a, b: the two halves of a head
    [a0 b0 a1 b1 .]  ->  [a0 cos - b0 sin, b0 cos + a0 sin, .]    interleaved

The rotation is computed in fp32. Angles are computed once a step from true positions, so that chunks, prefix hits and sequences
split over ranks cannot get a wrong offset.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from actors.model.kernels.native.library import library
from actors.model.step.batch import Batch
from actors.model.step.rope_frequencies import dynamic_frequencies, inverse_frequencies, long_frequencies, original_max_position
from placement.model.spec import RopeSpec

Rotate = Callable[[Tensor], Tensor]
"""A function that rotates [tokens, heads, head_dim] by the angles of one step, and keeps the dtype."""


@dataclass(frozen=True)
class Rotation:
    """The angles of one step. `cos` and `sin` are [tokens, 1, head_dim] fp32; the first half of `sin` is negated."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate `x` [tokens, heads, head_dim] and keep its dtype. Rolling by half a head swaps the halves."""
        native = library(x)
        if native is not None:
            return native.rotate(x, self.cos, self.sin)
        swapped = x.roll(x.shape[-1] // 2, -1)
        return torch.addcmul(x * self.cos, swapped, self.sin).to(x.dtype)


@dataclass(frozen=True)
class PairRotation:
    """A `Rotation` of neighbouring elements (interleaved): every other element of `sin`, from the first, is negated."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate `x` [tokens, heads, head_dim] and keep its dtype."""
        swapped = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).flip(-1).flatten(-2)
        return torch.addcmul(x * self.cos, swapped, self.sin).to(x.dtype)


@dataclass(frozen=True)
class PartialRotation:
    """Rotates the first `dims` dimensions of each head and leaves the others unchanged."""

    inner: Rotate
    dims: int

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate `x` [tokens, heads, head_dim] and keep its dtype."""
        return torch.cat((self.inner(x[..., : self.dims]), x[..., self.dims :]), -1)


class StepRope(Protocol):
    """Makes the rotation of each step."""

    def of(self, batch: Batch) -> Rotate:
        """Return the function that rotates queries or keys [tokens, heads, head_dim] of the tokens of `batch` by their
        positions."""


class NoRope:
    """The rope of layers without rotary embedding."""

    def of(self, batch: Batch) -> Rotate:
        """See `StepRope.of`. Returns the identity."""
        return unrotated


class Rope:
    """Makes rotations from positions, for one head size."""

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device | str = "cpu") -> None:
        inverse, self.attention_factor = inverse_frequencies(spec, head_dim)
        self._inverse_frequencies = inverse.to(device)
        self._rotation = _neighbours if spec.interleaved else _halves
        self._dims, self._head_dim = spec.rotary_dims or head_dim, head_dim

    def of(self, batch: Batch) -> Rotate:
        """See `StepRope.of`."""
        return self.at(batch.positions)

    def at(self, positions: Tensor) -> Rotate:
        """Return the function that rotates [tokens, heads, head_dim] by `positions` [tokens] int64, which are positions in the
        whole sequence."""
        return self._rotation_by(positions.to(torch.float32)[:, None] * self._inverse_frequencies)

    def _rotation_by(self, angles: Tensor) -> Rotate:
        """Return the rotation by `angles` [tokens, rotary_dims / 2] radians."""
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        rotate = self._rotation(cos, sin)
        return rotate if self._dims == self._head_dim else PartialRotation(rotate, self._dims)


class LengthRope(Rope, ABC):
    """A rope whose frequencies depend on the length of the sequence.

    In transformers the longest sequence of the batch, as far as it has been run, determines them, so that an answer would
    depend on the rest of the batch and on the chunk size. Here each token has its own length, known from the start,

        length(token at position p of a sequence) = max(deciding length of the sequence, p + 1)

    where the deciding length (`RopeSpec.deciding_length`) comes with the sequence. Keys are never rotated again; sequences with
    different `RopeSpec.length_class` share no cached keys.
    """

    def of(self, batch: Batch) -> Rotate:
        """See `StepRope.of`."""
        lengths, counts = (
            torch.tensor(lens, dtype=torch.int64, device=batch.positions.device) for lens in (batch.rope_lens, batch.query_lens)
        )
        lengths = lengths.repeat_interleave(counts)
        return self.in_sequences(batch.positions, torch.maximum(lengths, batch.positions + 1))

    def in_sequences(self, positions: Tensor, lengths: Tensor) -> Rotate:
        """Return the function that rotates [tokens, heads, head_dim] by `positions`, of tokens in sequences of these `lengths`
        in tokens; both [tokens] int64."""
        return self._rotation_by(positions.to(torch.float32)[:, None] * self._frequencies(lengths))

    @abstractmethod
    def _frequencies(self, lengths: Tensor) -> Tensor:
        """Return radians per position, [tokens, rotary_dims / 2]."""


class LongRope(LengthRope):
    """LongRoPE: one set of frequencies up to the trained length, another beyond it (Ding et al. 2024, arXiv 2402.13753)."""

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device | str = "cpu") -> None:
        super().__init__(spec, head_dim, device)
        self._long = long_frequencies(spec, self._dims).to(device)
        self._original = original_max_position(spec)

    def _frequencies(self, lengths: Tensor) -> Tensor:
        return torch.where((lengths > self._original)[:, None], self._long, self._inverse_frequencies)


class DynamicRope(LengthRope):
    """Dynamic NTK scaling: frequencies for every length beyond the trained one (`dynamic_frequencies`)."""

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device | str = "cpu") -> None:
        super().__init__(spec, head_dim, device)
        self._spec = spec

    def _frequencies(self, lengths: Tensor) -> Tensor:
        return dynamic_frequencies(self._spec, self._dims, lengths)


_KINDS: dict[str, type[Rope]] = {"longrope": LongRope, "dynamic": DynamicRope}


def make_rope(spec: RopeSpec | None, head_dim: int, device: torch.device | str = "cpu") -> StepRope:
    """Return the rope of the layers with the RoPE parameters `spec`, from `ModelSpec.rope_of` (None: they do not rotate).
    `head_dim` is the size of a head, and tables are on `device`."""
    if spec is None:
        return NoRope()
    return _KINDS.get(spec.kind, Rope)(spec, head_dim, device)


def _halves(cos: Tensor, sin: Tensor) -> Rotate:
    return Rotation(torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])


def _neighbours(cos: Tensor, sin: Tensor) -> Rotate:
    return PairRotation(torch.stack((cos, cos), -1).flatten(-2)[:, None], torch.stack((-sin, sin), -1).flatten(-2)[:, None])


def unrotated(x: Tensor) -> Tensor:
    """Return `x`: the rotation of layers without rotary embedding."""
    return x
