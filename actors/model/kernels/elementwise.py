"""Sums of hidden states, with the fastest kernel for the device."""

from __future__ import annotations

from torch import Tensor

from actors.model.kernels.native.library import library


def plus(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a + b`` for two tensors [rows, width] of one dtype."""
    native = library(a)
    if native is None or not a.is_contiguous() or b.stride(1) != 1:
        return a + b
    return native.add(a, b)
