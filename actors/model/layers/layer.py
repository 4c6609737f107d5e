"""One transformer layer and its grouped-query attention. `actors.model.build` decides which parts a model has."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from actors.groups.group import Group
from actors.model.attention.backend import AttentionBackend
from actors.model.attention.params import AttentionParams
from actors.model.kernels.elementwise import plus
from actors.model.layers.layers import (
    ColumnParallel,
    RowParallel,
)
from actors.model.layers.qk_norm import WidthNorm, mean_squares
from actors.model.step.rope import Rotate
from actors.model.step.step import Step
from placement.model.spec import ModelSpec
from placement.ownership.shard import Shard


class Layer(nn.Module):
    """One transformer layer. A norm that the model does not have is the identity, chosen when the layer is built."""

    def __init__(
        self,
        input_norm: nn.Module,
        attn: nn.Module,
        attn_out_norm: nn.Module,
        post_norm: nn.Module,
        mlp: nn.Module,
        mlp_out_norm: nn.Module,
    ) -> None:
        super().__init__()
        self.input_norm, self.attn, self.attn_out_norm = input_norm, attn, attn_out_norm
        self.post_norm, self.mlp, self.mlp_out_norm = post_norm, mlp, mlp_out_norm

    def forward(self, hidden: Tensor, step: Step) -> Tensor:
        """Return the hidden states after this layer. `hidden` and the result are this rank's part of [tokens, hidden]
        (`Region`). Writes the step's keys and values to the cache of `step`. A collective of the tp group."""
        hidden = plus(hidden, self.attn_out_norm(self.attn(self.input_norm(hidden), step)))
        return plus(hidden, self.mlp_out_norm(self.mlp(self.post_norm(hidden), step)))


class GroupedAttention(nn.Module):
    """Grouped-query attention over this rank's heads, with rotary positions and a paged cache."""

    def __init__(
        self,
        spec: ModelSpec,
        own: Shard,
        params: AttentionParams,
        rope: int,
        backend: AttentionBackend,
        qkv: ColumnParallel,
        o: RowParallel,
    ) -> None:
        super().__init__()
        self.qkv, self.o, self.sinks = qkv, o, params.sinks
        self.params, self._rope, self._backend = params, rope, backend
        self.kind = spec.kind_of(params.layer)
        kind, (q_heads, kv_heads) = spec.kinds[self.kind], own.heads[self.kind]
        self._q_heads, self._kv_heads = len(q_heads), len(kv_heads)
        self._key_dim, self._value_dim = kind.key_dim, kind.value_dim

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Return the attention output of the hidden states `x`, and write the step's keys and values to the cache of `step`.
        `x` and the result are this rank's part of [tokens, hidden] (`Region`). A collective of the tp group."""
        projected, rotated = self.qkv(x, step.region), self._q_heads + self._kv_heads
        qk, v = projected.tensor_split((rotated * self._key_dim,), 1)
        qk, v = qk.view(-1, rotated, self._key_dim), self._valued(v.view(-1, self._kv_heads, self._value_dim))
        q, k = self._rotated(qk, step.rotations[self._rope])
        paged = step.paged[self.kind]
        out = self._backend.attend(q, k, v, paged.cache, paged.plan, self.params)
        return self.o(out.flatten(1), step.region)  # type: ignore[no-any-return]

    def _rotated(self, qk: Tensor, rotate: Rotate) -> tuple[Tensor, Tensor]:
        """Return the rotated queries and keys of `qk`, the query and key heads [tokens, q_heads + kv_heads, head_dim]."""
        return self._split(rotate(qk))

    def _valued(self, v: Tensor) -> Tensor:
        """Return value heads [tokens, kv_heads, value_dim] as they are cached."""
        return v

    def _split(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        return qk[:, : self._q_heads], qk[:, self._q_heads :]


class ScaledValueAttention(GroupedAttention):
    """`GroupedAttention` whose values are multiplied by a constant (MiMo-V2)."""

    def __init__(self, spec: ModelSpec, *parts: Any) -> None:
        super().__init__(spec, *parts)
        self._value_scale = spec.value_scale

    def _valued(self, v: Tensor) -> Tensor:
        return v * self._value_scale


class NormedAttention(GroupedAttention):
    """`GroupedAttention` with an RMS norm over each query and key head before the rotation (Qwen3)."""

    def __init__(self, *parts: Any, q_norm: nn.Module, k_norm: nn.Module) -> None:
        super().__init__(*parts)
        self.q_norm, self.k_norm = q_norm, k_norm

    def _rotated(self, qk: Tensor, rotate: Rotate) -> tuple[Tensor, Tensor]:
        q, k = self._split(qk)
        return rotate(self.q_norm(q)), rotate(self.k_norm(k))


class WidthNormedAttention(GroupedAttention):
    """`GroupedAttention` with RMS norms over all query heads and over all key heads of all ranks (OLMo-2)."""

    def __init__(self, spec: ModelSpec, own: Shard, *parts: Any, q_norm: WidthNorm, k_norm: WidthNorm, group: Group) -> None:
        super().__init__(spec, own, *parts)
        self.q_norm, self.k_norm = q_norm, k_norm
        self._mean_squares = partial(mean_squares, spec=spec, own=own, group=group)

    def _rotated(self, qk: Tensor, rotate: Rotate) -> tuple[Tensor, Tensor]:
        q, k = self._split(qk)
        q_mean, k_mean = self._mean_squares(q, k)
        return rotate(self.q_norm(q, q_mean)), rotate(self.k_norm(k, k_mean))
