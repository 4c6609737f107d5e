"""Selects the attention kernel of a CUDA device: the first installed package that supports the page size.

    vllm_flash_attn (stand-alone)   pages of 16 tokens      vllm.vllm_flash_attn   pages of 16
    flash_attn                      pages of 256            torch varlen_attn      pages of 256

All of them need fp16 or bf16, and head dimensions of at most 256. Otherwise pages are gathered for
`scaled_dot_product_attention`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from actors.model.attention.backend import AttentionBackend
from actors.model.attention.cuda.gather import GatherAttention
from actors.model.attention.cuda.varlen import VarlenAttention, VarlenKernel, flash_attn_kernel, torch_kernel, vllm_kernel

Import = Callable[[str], ModuleType]


@dataclass(frozen=True)
class _Offer:
    """A kernel that a package may provide, the page size it supports, and its adapter."""

    module: str
    function: str
    page_multiple: int
    adapt: Callable[[Callable[..., Any]], VarlenKernel]
    needs: str
    """A parameter that older versions of the function lack."""


_OFFERS = (
    _Offer("vllm_flash_attn", "flash_attn_varlen_func", 16, flash_attn_kernel, "block_table"),
    _Offer("vllm.vllm_flash_attn", "flash_attn_varlen_func", 16, vllm_kernel, "seqused_k"),
    _Offer("flash_attn", "flash_attn_varlen_func", 256, flash_attn_kernel, "block_table"),
    _Offer("torch.nn.attention.varlen", "varlen_attn", 256, torch_kernel, "block_table"),
)


MOST_HEAD_DIM = 256
"""The largest head dimension for which flash-attention kernels are built."""


def choose_cuda(
    dtype: torch.dtype,
    block_size: int,
    load: Import = importlib.import_module,
    softcap: bool = False,
    sinks: bool = False,
    head_dim: int = 128,
    value_dim: int | None = None,
) -> AttentionBackend:
    """Return a backend on the first usable flash-attention package, or one on gathered pages of `block_size` tokens if there is
    none. A package that is missing, too old, or built for another torch is skipped. `load` imports a module by its name.

    With `softcap`, a package that cannot cap scores is skipped too. All packages are skipped for dtypes other than fp16 and
    bf16, head dimensions above 256, a model with `sinks`, which need the log-sum-exp, and one whose values differ in size from
    its keys (`value_dim`).
    """
    fits = head_dim <= MOST_HEAD_DIM and value_dim in (None, head_dim)
    if dtype in (torch.float16, torch.bfloat16) and not sinks and fits:
        for offer in _OFFERS:
            function = _find(offer, load, softcap) if block_size % offer.page_multiple == 0 else None
            if function is not None:
                return VarlenAttention(f"{offer.module} (CUDA)", offer.adapt(function))
    return GatherAttention()


def _find(offer: _Offer, load: Import, softcap: bool) -> Callable[..., Any] | None:
    try:
        function = getattr(load(offer.module), offer.function)
    except (ImportError, OSError, AttributeError):  # a wheel built for another torch fails with an undefined symbol
        return None
    needs = {offer.needs, "softcap"} if softcap else {offer.needs}
    return function if needs <= inspect.signature(function).parameters.keys() else None
