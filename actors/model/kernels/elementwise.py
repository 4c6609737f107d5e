"""Operations on hidden states that are no matrix products, with the fastest kernel for the device."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from actors.model.kernels.native.library import library


def plus(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a + b`` for two tensors [rows, width] of one dtype."""
    native = library(a)
    if native is None or not a.is_contiguous() or b.stride(1) != 1:
        return a + b
    return native.add(a, b)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x` [rows, width] or [rows, heads, width] normed over its last dimension (RMS) in fp32 and multiplied by `weight`
    [width], in x's dtype."""
    native = library(x)
    return F.rms_norm(x, weight.shape, weight, eps) if native is None else native.rms_norm(x, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` [rows, width] for `gate_up` [rows, 2 * width], the two side by side."""
    native = library(gate_up)
    if native is not None:
        return native.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
