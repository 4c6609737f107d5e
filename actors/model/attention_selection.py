"""Selects the attention backend of a device: the fastest kernels installed."""

from __future__ import annotations

import torch

from actors.model.attention.backend import AttentionBackend
from actors.model.attention.cpu.backend import CpuAttention
from actors.model.attention.cpu.partial_kernel import CpuPartial
from actors.model.attention.cuda.choose import choose_cuda
from actors.model.attention.cuda.partial_kernels import choose_cuda_partial
from actors.model.attention.partial import PartialKernel
from actors.model.latent.local import LocalLatent
from placement.model.mla_spec import MLASpec


def choose(
    device: torch.device | str,
    dtype: torch.dtype,
    block_size: int = 16,
    softcap: bool = False,
    sinks: bool = False,
    head_dim: int = 128,
    value_dim: int | None = None,
) -> AttentionBackend:
    """Return the fastest backend installed for this device, dtype, page size (`block_size` tokens) and head dimension.

    `softcap` and `sinks` require a backend that supports capped scores or attention sinks. `value_dim` is the head dimension of
    values, by default `head_dim`. Some backend always fits.
    """
    if torch.device(device).type == "cuda":
        return choose_cuda(dtype, block_size, softcap=softcap, sinks=sinks, head_dim=head_dim, value_dim=value_dim)
    backend: AttentionBackend = CpuAttention()
    return backend


def choose_partial(device: torch.device | str, dtype: torch.dtype, block_size: int, softcap: bool = False) -> PartialKernel:
    """Return the fastest partial attention kernels installed for this device, dtype and page size (`block_size` tokens). With
    `softcap`, they can cap scores."""
    if torch.device(device).type == "cuda":
        return choose_cuda_partial(dtype, block_size, softcap=softcap)
    kernel: PartialKernel = CpuPartial()
    return kernel


def choose_latent(mla: MLASpec, device: torch.device | str, dtype: torch.dtype, block_size: int) -> LocalLatent:
    """Return the latent attention (MLA) backend for a model with the dimensions `mla`, on top of the fastest kernels installed
    for this device, dtype and page size (`block_size` tokens)."""
    paged = choose(device, dtype, block_size, head_dim=mla.latent_dim)
    return LocalLatent(mla, paged, choose_partial(device, dtype, block_size))
