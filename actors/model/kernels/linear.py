"""Dense matrix products, with the fastest kernel for the device, the dtype and the number of rows.

Layers call `linear` and `linear_by_head` and do not depend on the choice. No other module multiplies activations by weights,
except for the products of experts (`actors.model.kernels.grouped`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_ROW_MULTIPLE = 4
"""The fp32 kernel computes rows in groups of this size."""
_FEW_ROWS = 8
"""Up to this number of bf16 rows the transposed product is faster."""
_HAS_BFLOAT16 = hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported") and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
"""Whether this CPU has instructions for bfloat16 matrix products (AVX-512, or Arm's bf16)."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias`` [rows, outputs] for `x` [rows, inputs], `weight` [outputs, inputs] and `bias` [outputs],
    all of one dtype."""
    if x.device.type == "cpu" and x.dtype is torch.float32:
        return _padded_linear(x, weight, bias)
    if x.device.type == "cpu" and x.dtype is torch.bfloat16 and x.shape[0] > 0:
        return _bfloat16_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def linear_by_head(x: Tensor, weights: Tensor) -> Tensor:
    """Return ``x[h] @ weights[h]`` for each head h, [heads, rows, outputs], for `x` [heads, rows, inputs] and `weights` [heads,
    inputs, outputs]."""
    rows = x.shape[1]
    if x.device.type == "cpu" and x.dtype is torch.float32 and rows % _ROW_MULTIPLE:
        return torch.matmul(F.pad(x, (0, 0, 0, -rows % _ROW_MULTIPLE)), weights)[:, :rows]  # as in `_padded_linear`
    return torch.matmul(x, weights)


def _padded_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the product of rows padded to a multiple of four.

    The fp32 kernel computes the last one to three rows differently, and the result of a request should not depend, in any bit,
    on how many rows share the step.
    """
    rows = x.shape[0]
    if rows % _ROW_MULTIPLE == 0:
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, -rows % _ROW_MULTIPLE)), weight, bias)[:rows]


def _bfloat16_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a bfloat16 product on a CPU, with the fastest kernel for this number of rows.

    `F.linear` repacks the whole weight on each call, which costs about as much as the product while rows are few (SmolLM2
    shapes, AVX-512: the transposed product is 1.2 to 1.6 times faster up to 8 rows, not from 32). A CPU without AVX-512 has
    only a slow generic kernel: widening both sides to fp32 first takes half its time at 32 rows and a sixth at 256 (AVX2, one
    thread). All of these accumulate in fp32.
    """
    if x.shape[0] == 1:
        return _plus(torch.mv(weight, x[0])[None], bias)
    if not _HAS_BFLOAT16:
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    if x.shape[0] <= _FEW_ROWS:
        return _plus(torch.mm(weight, x.t().contiguous()).t().contiguous(), bias)
    return F.linear(x, weight, bias)


def _plus(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out.add_(bias)
