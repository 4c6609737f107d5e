"""The grouped matrix product (grouped GEMM): rows sorted by expert, each multiplied by its own expert's matrix.

    rows    [ a a a | c c | d d d d ]       ends 3 3 5 9: expert b has none
    weight  [ A, B, C, D ]

On CPU it is a loop. ``torch._grouped_mm`` is a loop there too (2 cores, 8 and 64 experts, 1 to 512 tokens: 0.8 to 1.2 times as
fast, neither always ahead), and needs strides of whole 16 bytes, which uneven slices of an expert do not have. With the loop
the result of a row does not depend on the other rows, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actors.model.kernels.linear import linear, num_outputs

_ALIGNMENT = 16


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return ``x[i] @ weight[e].T`` [rows, outputs], where e is the expert of row i, for `x` [rows, inputs], sorted by expert,
    and `weight` [experts, outputs, inputs], which may be packed (`pack_weights`).

    `ends` [experts] (int64) holds one past the last row of each expert.
    """
    if x.device.type == "cuda" and x.dtype is torch.bfloat16 and _aligned(weight):
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends.to(torch.int32))
    out = x.new_empty(x.shape[0], num_outputs(weight))
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            out[start:end] = linear(x[start:end], weight[expert])
        start = end
    return out


def _aligned(weight: Tensor) -> bool:
    return all(size * weight.itemsize % _ALIGNMENT == 0 for size in weight.shape[1:])
