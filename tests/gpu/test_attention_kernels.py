"""Each paged attention kernel of a CUDA device against the CPU's, in fp32, over one step of chunks and decode rows."""

from __future__ import annotations

import importlib
import random
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from actors.model.attention.backend import AttentionBackend
from actors.model.attention.cpu.backend import CpuAttention
from actors.model.attention.cuda.choose import choose_cuda
from actors.model.attention.cuda.gather import GatherAttention
from actors.model.attention.params import AttentionParams
from actors.model.kv.kv_cache import KVCache
from tests.support.models.tiny_decoder import Part, batch_of

PACKAGES = {"vllm_flash_attn": 16, "vllm.vllm_flash_attn": 16, "flash_attn": 256, "torch.nn.attention.varlen": 256}
"""Packages with a paged kernel, and the tokens of a page that it can read."""

TOLERANCES = {torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}

PARTS: list[Part] = [(0, 0, 5), (1, 11, 1), (2, 7, 90), (3, 0, 1), (4, 1500, 1), (5, 300, 200)]
"""(sequence, cached tokens, new tokens): first chunks, later chunks and decode rows."""


def only(name: str) -> AttentionBackend:
    """The backend on the kernel of one package; the test is skipped where it cannot be had."""

    def load(module: str) -> ModuleType:
        if module != name:
            raise ImportError(module)
        return importlib.import_module(module)

    backend = choose_cuda(torch.bfloat16, PACKAGES[name], load)
    if isinstance(backend, GatherAttention):
        pytest.skip(f"{name} is not installed here, or is too old to read pages")
    return backend


@dataclass(frozen=True)
class Case:
    """One step over random keys and values, on the CPU."""

    q: Tensor
    k: Tensor
    v: Tensor
    cache: KVCache
    tables: list[list[int]]

    @classmethod
    def draw(cls, dtype: torch.dtype, block_size: int, head_dim: int, q_heads: int, kv_heads: int) -> Case:
        noise = torch.Generator().manual_seed(0)

        def values(*shape: int) -> Tensor:
            return torch.randn(shape, generator=noise).to(dtype).float()

        totals = [start + count for _, start, count in PARTS]
        needs = [-(-total // block_size) for total in totals]
        blocks = random.Random(0).sample(range(sum(needs) + 3), sum(needs))
        tables = [[blocks.pop() for _ in range(need)] for need in needs]
        cache = KVCache(range(1), kv_heads, sum(needs) + 3, block_size, head_dim, torch.float32)
        cache.pages(0).copy_(values(*cache.pages(0).shape))
        tokens = sum(count for _, _, count in PARTS)
        q, k, v = values(tokens, q_heads, head_dim), values(tokens, kv_heads, head_dim), values(tokens, kv_heads, head_dim)
        return cls(q, k, v, cache, tables)

    def run(self, backend: AttentionBackend, params: AttentionParams, dtype: torch.dtype, device: torch.device) -> Tensor:
        """What `backend` answers on `device` with everything in `dtype`, back on the CPU in fp32."""
        pages = self.cache
        cache = KVCache(range(1), pages.kv_heads, pages.num_blocks, pages.block_size, pages.head_dim, dtype, device)
        cache.pages(0).copy_(pages.pages(0))
        texts = [[0] * (start + count) for _, start, count in PARTS]
        batch = batch_of(PARTS, texts, self.tables, pages.block_size, device)
        q, k, v = (x.to(device, dtype) for x in (self.q, self.k, self.v))
        with torch.inference_mode():
            return backend.attend(q, k, v, cache, backend.prepare(batch, cache), params).float().cpu()


def check(case: Case, backend: AttentionBackend, params: AttentionParams, dtype: torch.dtype, device: torch.device) -> None:
    right = case.run(CpuAttention(), params, torch.float32, torch.device("cpu"))
    on_device = replace(params, sinks=None if params.sinks is None else params.sinks.to(device))
    found, tolerance = case.run(backend, on_device, dtype, device), TOLERANCES[dtype]
    torch.testing.assert_close(found, right, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=["MHA", "GQA"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_s_kernel_equals_the_cpu_s(
    package: str, dtype: torch.dtype, window: int | None, head_dim: int, heads: tuple[int, int], device: torch.device
) -> None:
    case = Case.draw(dtype, PACKAGES[package], head_dim, *heads)
    check(case, only(package), AttentionParams(0, head_dim**-0.5, window), dtype, device)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_gathered_pages_equal_the_cpu_s(
    dtype: torch.dtype, window: int | None, softcap: float | None, device: torch.device
) -> None:
    case = Case.draw(dtype, 16, 64, 8, 2)
    check(case, GatherAttention(), AttentionParams(0, 0.125, window, softcap), dtype, device)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_sinks_over_gathered_pages_equal_the_cpu_s(dtype: torch.dtype, device: torch.device) -> None:
    sinks = torch.linspace(-2, 2, 8)
    check(Case.draw(dtype, 16, 64, 8, 2), GatherAttention(), AttentionParams(0, 0.125, sinks=sinks), dtype, device)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("block_size", [16, 256])
def test_the_kernel_this_machine_chooses_equals_the_cpu_s(dtype: torch.dtype, block_size: int, device: torch.device) -> None:
    backend = choose_cuda(dtype, block_size)
    check(Case.draw(dtype, block_size, 128, 8, 2), backend, AttentionParams(0, 128**-0.5), dtype, device)
