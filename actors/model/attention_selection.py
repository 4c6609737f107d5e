"""Which attention kernels a device gets: the fastest ones present."""

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
    """The fastest backend present for this device, dtype, page size (tokens per block) and size of heads.

    `softcap`: which can cap scores; `sinks`: which can do sinks; `value_dim`: not given, that of values is `head_dim` too.
    """
    if torch.device(device).type == "cuda":
        return choose_cuda(dtype, block_size, softcap=softcap, sinks=sinks, head_dim=head_dim, value_dim=value_dim)
    backend: AttentionBackend = CpuAttention()
    return backend


def choose_partial(device: torch.device | str, dtype: torch.dtype, block_size: int, softcap: bool = False) -> PartialKernel:
    """The kernels of a device; `softcap`: which can cap scores."""
    if torch.device(device).type == "cuda":
        return choose_cuda_partial(dtype, block_size, softcap=softcap)
    kernel: PartialKernel = CpuPartial()
    return kernel


def choose_latent(mla: MLASpec, device: torch.device | str, dtype: torch.dtype, block_size: int) -> LocalLatent:
    """Latent attention by the kernels of a device."""
    paged = choose(device, dtype, block_size, head_dim=mla.latent_dim)
    return LocalLatent(mla, paged, choose_partial(device, dtype, block_size))
