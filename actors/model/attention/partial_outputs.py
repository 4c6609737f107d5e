"""Partial attention: adding up what queries got from disjoint parts of their keys, and sending such parts between ranks.

A part is an output and its log-sum-exp. On the wire they are one tensor, so that an exchange is one collective (the scheme of
Helix, arXiv 2507.07120)::

    [ output: head_dim elements | LSE: one fp32, as 4 bytes / element size elements ]
"""

from __future__ import annotations

import torch
from torch import Tensor

from actors.model.attention.merge import merge


class OutputAccumulator:
    """Attention of `heads` x `tokens` queries over the parts added so far, in fp32 whatever the model computes in."""

    def __init__(self, heads: int, tokens: int, dim: int, device: torch.device) -> None:
        self.out = torch.zeros(heads, tokens, dim, device=device)
        """[heads, tokens, dim] fp32; 0 where nothing was seen."""
        self.lse = torch.full((heads, tokens), -torch.inf, device=device)
        """[heads, tokens] fp32; -inf where nothing was seen."""

    def add(self, tokens: slice | Tensor, out: Tensor, lse: Tensor) -> None:
        """What `tokens` got from further keys: `out` [heads, tokens, dim], `lse` [heads, tokens]."""
        part = (out.to(torch.float32), lse)
        self.out[:, tokens], self.lse[:, tokens] = merge(((self.out[:, tokens], self.lse[:, tokens]), part))


def pack(out: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    """Output [..., dim] and LSE [...] fp32 as one tensor [..., dim + 4 / element size] of `dtype`, the LSE exact."""
    return torch.cat((out.to(dtype), lse.unsqueeze(-1).contiguous().view(dtype)), -1)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `pack`: output [..., dim] and LSE [...] fp32."""
    lse_elements = 4 // packed.itemsize
    return packed[..., :-lse_elements], packed[..., -lse_elements:].contiguous().view(torch.float32).squeeze(-1)


def merge_packed(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Output and LSE, both fp32, over the packed parts ``packed[0], packed[1], ...``"""
    outs, lses = unpack(packed)
    return merge([(out.to(torch.float32), lse) for out, lse in zip(outs, lses, strict=True)])
