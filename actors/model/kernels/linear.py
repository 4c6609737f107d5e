"""Dense matrix products, with the fastest kernel for the device, the dtype and the number of rows.

Layers call `linear` and `linear_by_head` and do not depend on the choice. No other module multiplies activations by weights,
except for the products of experts (`actors.model.kernels.grouped`).

On a CPU with bfloat16 instructions, kernels read a weight in blocks, which `pack_weights` makes once, in place of the plain
weight: for our own kernel (`actors.model.kernels.native`), or for oneDNN's where there is no compiler. From a plain weight each
call would make them again, which costs as much as the product of a few rows. All linears of one decode step of SmolLM2-135M
(121 products; Sapphire Rapids, 2 threads, ms; reading the weights once takes 13.1 there):

    rows                  1      8     32    128
    plain              28.4   35.4   43.4
    packed, oneDNN     25.9   25.4   36.1
    packed, ours       13.8   15.1   20.3   51.5
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actors.model.kernels.native.library import PACK_SIDE, library

_ROW_MULTIPLE = 4
"""The fp32 kernel computes rows in groups of this size."""
_FEW_ROWS = 8
"""Up to this number of bf16 rows the transposed product is faster."""
_PACKED_DIMS = 5
"""Dimensions of one weight that is packed for our own kernel (`Library.pack`)."""
_PACKED_FOR_ROWS = 8
"""The number of rows that oneDNN's packed form is chosen for. At other numbers it is at most 10 % slower than their own."""
_HAS_BFLOAT16 = hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported") and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
"""Whether this CPU has instructions for bfloat16 matrix products (AVX-512, or Arm's bf16)."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias`` [rows, outputs] for `x` [rows, inputs], `weight` [outputs, inputs] and `bias` [outputs],
    all of one dtype. The weight may be packed (`pack_weights`)."""
    if weight.dim() == _PACKED_DIMS:
        native = library(x)
        assert native is not None, "a process that has packed weights has the kernels that read them"
        return native.linear(x, weight, bias)
    if weight.is_mkldnn:
        return _onednn_linear(x, weight, bias)
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


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Return the rows `ids` [tokens] int64 of `weight` [outputs, inputs], which may be packed as for our own kernel: [tokens,
    inputs]."""
    if weight.dim() != _PACKED_DIMS:
        return F.embedding(ids, weight)
    # [outputs / 32, inputs / 32, 2 tiles, 16 pairs of inputs, 16 outputs, 2 inputs]
    elements = weight.view(*weight.shape[:4], 16, 2)
    block, within = ids // PACK_SIDE, ids % PACK_SIDE
    return elements[block, :, within // 16, :, within % 16].flatten(1)


def pack_weights(model: nn.Module) -> None:
    """Pack the weights of the products of `model`, where this device and dtype have packed kernels. Call it once, when the
    weights are loaded; only `linear` and `embedding` can read a packed weight.

    A module names the parameters that only `linear` reads in its attribute ``linear_weights``, and those that only `embedding`
    reads in ``embedding_weights``. Of the latter only tied ones are packed, and only for our own kernel: `embedding` cannot
    read oneDNN's form.
    """
    rows = {id(weight): (module, name) for module, name, weight in _named(model, "embedding_weights")}
    for module, name, weight in list(_named(model, "linear_weights")):
        packed = nn.Parameter(_packed(weight, id(weight) in rows), requires_grad=False)
        setattr(module, name, packed)
        if id(weight) in rows:
            setattr(*rows[id(weight)], packed)


def num_outputs(weight: Tensor) -> int:
    """Return the number of outputs of `weight`, one matrix or one for each expert, packed or not."""
    return int(weight.shape[-2] if weight.dim() < _PACKED_DIMS else weight.shape[-_PACKED_DIMS] * PACK_SIDE)


def _named(model: nn.Module, attribute: str) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in model.modules():
        for name in getattr(module, attribute, ()):
            yield module, name, getattr(module, name)


@torch.inference_mode()
def _packed(weight: Tensor, is_tied: bool = False) -> Tensor:
    """Return `weight` [outputs, inputs], or one an expert [experts, outputs, inputs], packed if there is a kernel for it."""
    if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16 or weight.numel() == 0:
        return weight
    native = library(weight)
    if native is not None and native.packs and all(size % PACK_SIDE == 0 for size in weight.shape[-2:]):
        return native.pack(weight)
    if not _HAS_BFLOAT16 or is_tied or weight.dim() != 2:
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_FOR_ROWS)  # type: ignore[no-any-return]


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.shape[0] == 0:
        return x.new_empty(0, weight.shape[0])
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


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
