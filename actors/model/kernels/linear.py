"""Dense matrix products, by whichever kernel is fastest for a device, a type and a number of rows.

Layers call `linear` and `linear_by_head` and know nothing of this choice; no other file multiplies activations by weights,
but for the products of experts (`actors.model.kernels.grouped`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_ROW_MULTIPLE = 4
"""The fp32 kernel computes rows in groups of this many."""
_FEW_ROWS = 8
"""Up to so many bf16 rows the product is faster the other way round."""
_HAS_BFLOAT16 = hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported") and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
"""Whether this CPU multiplies bfloat16 matrices by its own instructions (AVX-512, or Arm's bf16)."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` for `x` [rows, inputs] and `weight` [outputs, inputs]."""
    if x.device.type == "cpu" and x.dtype is torch.float32:
        return _padded_linear(x, weight, bias)
    if x.device.type == "cpu" and x.dtype is torch.bfloat16 and x.shape[0] > 0:
        return _bfloat16_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def linear_by_head(x: Tensor, weights: Tensor) -> Tensor:
    """``x[h] @ weights[h]`` for each head h: `x` [heads, rows, inputs], `weights` [heads, inputs, outputs]."""
    rows = x.shape[1]
    if x.device.type == "cpu" and x.dtype is torch.float32 and rows % _ROW_MULTIPLE:
        return torch.matmul(F.pad(x, (0, 0, 0, -rows % _ROW_MULTIPLE)), weights)[:, :rows]  # as in `_padded_linear`
    return torch.matmul(x, weights)


def _padded_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Rows padded to a multiple of four: the fp32 kernel computes the last one to three differently, and a request's bits
    should not depend on how many rows ride along."""
    rows = x.shape[0]
    if rows % _ROW_MULTIPLE == 0:
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, -rows % _ROW_MULTIPLE)), weight, bias)[:rows]


def _bfloat16_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """On a CPU, by whichever kernel is fastest for this many rows.

    `F.linear` lays the whole weight out anew on each call, which costs about as much as the product while rows are few
    (SmolLM2 shapes, AVX-512: the product the other way round is 1.2 to 1.6 times faster up to 8 rows, not from 32). A CPU
    without AVX-512 has only a slow generic kernel: widening both sides to fp32 first takes half its time at 32 rows and a
    sixth at 256 (AVX2, one thread). All of these sum in fp32.
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
