"""Tensor parallelism (TP): the layers of a dense transformer, on one rank's slice of the weights.

A layer receives its parameters and, in each step, its region; it depends on nothing else. Column-parallel layers split their
outputs, row-parallel ones split their inputs and sum over the ranks. The region implements the collectives (`regions.py`)::

        x ──gather──→ column parallel ──→ [own columns] ──→ row parallel ──→ partial sum ──sum──→ + bias ──→ y
                       (own rows of W)                     (own columns of W)                    (once)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actors.model.kernels.elementwise import plus, rms_norm, silu_mul
from actors.model.kernels.linear import embedding, linear
from actors.model.step.regions import Region
from actors.model.step.step import Step


class ColumnParallel(nn.Module):
    """A linear layer that holds some output rows of a matrix: ``[tokens, inputs] -> [tokens, own outputs]``."""

    linear_weights = ("weight",)

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor, region: Region) -> Tensor:
        """Return this rank's outputs for all tokens, [tokens, own outputs], from its part `x` of [tokens, inputs] in `region`,
        which is gathered first."""
        return linear(region.gather(x), self.weight, self.bias)


class RowParallel(nn.Module):
    """A linear layer that holds some input columns of a matrix: ``[tokens, own inputs] -> [tokens, outputs]``, summed over the
    ranks.

    The bias is added once, after the sum: every rank holds all of it.
    """

    linear_weights = ("weight",)

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor, region: Region) -> Tensor:
        """Return this rank's part in `region` of the outputs summed over the tp ranks, [tokens, outputs], plus the bias, from
        `x` [tokens, own inputs]."""
        total = region.sum(linear(x, self.weight))
        return total if self.bias is None else plus(total, self.bias.expand_as(total))


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (Zhang & Sennrich 2019), computed in fp32, returned in x's dtype."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self._eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` normed over its last dimension (RMS) and multiplied by the weight: same shape and dtype."""
        return rms_norm(x, self.weight, self._eps)


class OffsetRMSNorm(nn.Module):
    """`RMSNorm` with the weight ``weight + offset``. The sum is computed in fp32: near 1, bf16 would round most of a small
    weight away."""

    def __init__(self, weight: nn.Parameter, eps: float, offset: float) -> None:
        super().__init__()
        self.weight, self._eps, self._offset = weight, eps, offset

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` normed over its last dimension (RMS) and multiplied by weight plus offset: same shape and dtype."""
        weight = self.weight.to(torch.float32) + self._offset
        return F.rms_norm(x.to(torch.float32), weight.shape, weight, self._eps).to(x.dtype)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
"""The activation functions, by `ModelSpec.activation`."""


class GatedMLP(nn.Module):
    """SwiGLU or GeGLU (Shazeer 2020, arXiv 2002.05202): ``down(act(gate(x)) * up(x))``, with gate and up in one matrix."""

    def __init__(self, gate_up: ColumnParallel, down: RowParallel, activation: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.gate_up, self.down, self._activation = gate_up, down, activation

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Return the output of the MLP. `x` and the result are this rank's part of [tokens, hidden] in the region of `step`. A
        collective of the tp group."""
        return self.down(self._gated(self.gate_up(x, step.region)), step.region)  # type: ignore[no-any-return]

    def _gated(self, gate_up: Tensor) -> Tensor:
        if self._activation is F.silu:
            return silu_mul(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return self._activation(gate).mul_(up)


class VocabularyEmbedding(nn.Module):
    """Holds the embedding rows of the token ids in `vocab`: ``[tokens] -> [tokens, hidden]``, summed over the ranks."""

    embedding_weights = ("weight",)

    def __init__(self, weight: nn.Parameter, vocab: range) -> None:
        super().__init__()
        self.weight, self._vocab = weight, vocab

    def forward(self, token_ids: Tensor, received: Tensor | None, region: Region) -> Tensor:
        """Return this rank's part in `region` of the embeddings of `token_ids` [tokens]. A collective of the tp group.
        `received` is unused: it is the output of an earlier stage, and the first stage has none."""
        own = token_ids - self._vocab.start
        elsewhere = (own < 0) | (own >= len(self._vocab))
        rows = embedding(own.masked_fill(elsewhere, 0), self.weight)
        return region.sum(rows.masked_fill_(elsewhere[:, None], 0))


class ScaledEmbedding(VocabularyEmbedding):
    """`VocabularyEmbedding` times a constant, which is first rounded to the weight's dtype, as in Gemma's training."""

    def __init__(self, weight: nn.Parameter, vocab: range, scale: float) -> None:
        super().__init__(weight, vocab)
        self._scale = float(torch.tensor(scale, dtype=weight.dtype))

    def forward(self, token_ids: Tensor, received: Tensor | None, region: Region) -> Tensor:
        """See `VocabularyEmbedding.forward`. The result is multiplied by the scale."""
        return super().forward(token_ids, received, region) * self._scale


class VocabularyHead(nn.Module):
    """Holds the output rows of the token ids in `vocab`: ``[rows, hidden] -> [rows, len(vocab)]`` fp32 logits.

    Ids from `vocab_size` on are padding. Their logits are -inf, so that no sampler can choose them.
    """

    linear_weights = ("weight",)

    def __init__(self, weight: nn.Parameter, vocab: range, vocab_size: int) -> None:
        super().__init__()
        self.weight = weight
        self._real = min(max(vocab_size - vocab.start, 0), len(vocab))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits [rows, own vocabulary] of `hidden` [rows, hidden], after the last norm. Padding ids have -inf."""
        logits = self._shaped(linear(hidden, self.weight).to(torch.float32))
        logits[:, self._real :] = -torch.inf
        return logits

    def _shaped(self, logits: Tensor) -> Tensor:
        """Return the logits as the sampler receives them."""
        return logits


class CappedHead(VocabularyHead):
    """`VocabularyHead` whose logits are soft-capped to ``(-cap, cap)`` (Gemma 2)."""

    def __init__(self, weight: nn.Parameter, vocab: range, vocab_size: int, cap: float) -> None:
        super().__init__(weight, vocab, vocab_size)
        self._cap = cap

    def _shaped(self, logits: Tensor) -> Tensor:
        return softcap(logits, self._cap)


def softcap(scores: Tensor, cap: float) -> Tensor:
    """Return ``cap * tanh(scores / cap)``, which bounds `scores` to ``[-cap, cap]``, in new memory."""
    return scores.div(cap).tanh_().mul_(cap)
