"""Partial attention outputs: accumulating them over disjoint sets of keys, and packing them for exchange between ranks.

A partial output is an output and its log-sum-exp. They are sent as one tensor, so that an exchange is one collective (the
scheme of Helix, arXiv 2507.07120)::

    [ output: head_dim elements | LSE: one fp32, as 4 bytes / element size elements ]
"""

from __future__ import annotations

import torch
from torch import Tensor

from actors.model.attention.merge import merge


class OutputAccumulator:
    """The attention of `heads` x `tokens` queries over the parts added so far, always in fp32."""

    def __init__(self, heads: int, tokens: int, dim: int, device: torch.device) -> None:
        self.out = torch.zeros(heads, tokens, dim, device=device)
        """[heads, tokens, dim] fp32; 0 where no key was seen."""
        self.lse = torch.full((heads, tokens), -torch.inf, device=device)
        """[heads, tokens] fp32; -inf where no key was seen."""

    def add(self, tokens: slice | Tensor, out: Tensor, lse: Tensor) -> None:
        """Merge into the tokens `tokens` their attention to further keys: `out` [heads, tokens, dim], and its log-sum-exp `lse`
        [heads, tokens] fp32."""
        part = (out.to(torch.float32), lse)
        self.out[:, tokens], self.lse[:, tokens] = merge(((self.out[:, tokens], self.lse[:, tokens]), part))


def pack(out: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    """Return output [..., dim] and LSE [...] fp32 as one tensor [..., dim + 4 / element size] of `dtype`; the LSE stays
    exact."""
    return torch.cat((out.to(dtype), lse.unsqueeze(-1).contiguous().view(dtype)), -1)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output [..., dim] and LSE [...] fp32 of `packed`, a tensor that `pack` returned."""
    lse_elements = 4 // packed.itemsize
    return packed[..., :-lse_elements], packed[..., -lse_elements:].contiguous().view(torch.float32).squeeze(-1)


def merge_packed(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and LSE over the keys of all the parts ``packed[0], packed[1], ...`` (`pack`) together, both fp32."""
    outs, lses = unpack(packed)
    return merge([(out.to(torch.float32), lse) for out, lse in zip(outs, lses, strict=True)])
