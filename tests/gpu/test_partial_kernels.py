"""Each CUDA kernel of context parallelism, which also returns the log-sum-exp, against the eager reference in fp32."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch
from torch import Tensor

from actors.model.attention.cpu.partial_kernel import CpuPartial
from actors.model.attention.cuda.partial_kernels import EagerPartial, choose_cuda_partial
from actors.model.attention.decode_row import decode_row
from actors.model.attention.eager import eager_attention
from actors.model.attention.params import AttentionParams
from actors.model.attention.partial import PartialKernel
from actors.model.attention.partial_outputs import OutputAccumulator
from actors.model.kv.kv_cache import KVCache

PACKAGES = {"vllm_flash_attn": 16, "vllm.vllm_flash_attn": 16, "flash_attn": 256}
"""Packages with a kernel that returns the log-sum-exp, and the tokens of a page that it can read."""

KERNELS = {"eager": 16, **PACKAGES}
TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
PARAMS = AttentionParams(layer=0, scale=0.125)


def kernel_of(name: str) -> PartialKernel:
    """The kernel of one package; the test is skipped where it cannot be had."""

    def load(module: str) -> ModuleType:
        if module != name:
            raise ImportError(module)
        return importlib.import_module(module)

    kernel = choose_cuda_partial(torch.bfloat16, KERNELS[name], load)
    if name != "eager" and type(kernel) is EagerPartial:
        pytest.skip(f"{name} is not installed here, or does not return the log-sum-exp")
    return kernel


def draw(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("form", ["causal", "rectangle", "mask"])
@pytest.mark.parametrize("name", KERNELS)
def test_keys_at_hand(name: str, form: str, dtype: torch.dtype, device: torch.device) -> None:
    keys = 33 if form == "causal" else 70
    q, k, v = draw(dtype, 1, 8, 33, 64), draw(dtype, 1, 2, keys, 64), draw(dtype, 1, 2, keys, 64)
    mask = torch.zeros(1, 1, 33, keys).masked_fill_(torch.arange(keys) > 40, -torch.inf) if form == "mask" else None
    right = eager_attention(*(x.float() for x in (q, k, v)), PARAMS.scale, causal=form == "causal", mask=mask)
    there = None if mask is None else mask.to(device)
    out, lse = kernel_of(name).dense(*(x.to(device) for x in (q, k, v)), PARAMS, form == "causal", there)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.float().cpu(), right[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.float().cpu(), right[1], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", KERNELS)
def test_decode_rows_over_pages(name: str, dtype: torch.dtype, device: torch.device) -> None:
    size = KERNELS[name]
    pages, q = draw(dtype, 2, 2, 8, size, 64), draw(dtype, 3, 8, 64)
    rows = [decode_row(0, [3, 1], 0, size + 4, size), decode_row(1, [5], 0, 7, size), decode_row(2, [2, 6], 5, size + 9, size)]

    def run(kernel: PartialKernel, dtype: torch.dtype, device: torch.device) -> OutputAccumulator:
        cache, total = KVCache(range(1), 2, 8, size, 64, dtype, device), OutputAccumulator(8, 3, 64, device)
        cache.pages(0).copy_(pages)
        queries = q.to(device, dtype)
        for task in kernel.decode(rows, cache):
            out, lse = task.run_with_lse(queries[task.rows], cache, PARAMS)
            total.add(task.rows, out.transpose(0, 1), lse.transpose(0, 1))
        return total

    found, right = run(kernel_of(name), dtype, device), run(CpuPartial(), torch.float32, torch.device("cpu"))
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.out.cpu(), right.out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(found.lse.cpu(), right.lse, atol=tolerance, rtol=tolerance)
