"""One pipeline stage of one tp rank, composed from the model's spec and this rank's rows of the shard table.

    first stage                                                    last stage
    token ids -> embed -> [layer]*  -> hidden -> ... -> [layer]* -> norm -> head -> logits of my vocabulary rows

    layer:  hidden + attn_out_norm(attn(input_norm(hidden))),  then  hidden + mlp_out_norm(mlp(post_norm(hidden)))
            (a norm the model has not is the identity)

A stage is what it is by construction: `forward` does not ask where it runs. Parameters are exactly those of
`placement.shards.parameters`, uninitialised; a loader fills them in place.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from actors.model.attention import AttentionBackend
from actors.model.batch import Batch
from actors.model.group import Group
from actors.model.kv_cache import KVCache
from actors.model.kv_caches import KVCaches
from actors.model.latent.backend import LatentBackend
from actors.model.latent.build import latent_attention
from actors.model.layers import (
    ACTIVATIONS,
    CappedHead,
    ColumnParallel,
    GatedMLP,
    OffsetRMSNorm,
    RMSNorm,
    RowParallel,
    ScaledEmbedding,
    VocabularyEmbedding,
    VocabularyHead,
)
from actors.model.moe.block import MixtureOfExperts
from actors.model.moe.build import mixture
from actors.model.moe.exchanges import Exchanges, OnlySums
from actors.model.qk_norm import WidthNorm, mean_squares
from actors.model.regions import Region, Regions
from actors.model.rope import make_rope
from actors.model.step import Paged, Step
from placement.expert_tokens import Lanes
from placement.model_spec import ModelSpec
from placement.shards import Shard, parameters


class Decoder(nn.Module):
    """The layers ``own.layers`` of a model, on one rank of `tp`."""

    def __init__(
        self,
        spec: ModelSpec,
        own: Shard,
        tp: Group,
        attention: AttentionBackend | LatentBackend,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        scatter_from: int | None = None,
        exchanges: Exchanges | None = None,
    ) -> None:
        """`scatter_from`: prompt tokens of a step from which on it runs sequence parallel (`placement.sequence_parallel`);
        `exchanges`: how tokens get to experts, where these are not all in the tp group."""
        super().__init__()
        build = _Builder(spec, own, tp, attention, dtype, device)
        self.embed = build.embedding() if own.first_stage else ReceivedHidden()
        self.layers = nn.ModuleDict({str(layer): build.layer(layer) for layer in own.layers})
        self.norm = build.norm("norm") if own.last_stage else nn.Identity()
        self.head = build.head() if own.last_stage else NoHead(own)
        self.regions = Regions(tp, scatter_from)
        self.exchanges = exchanges or OnlySums()
        self._leave = _all_tokens if own.last_stage else _own_tokens
        self._ropes = [make_rope(rope, spec.turned_dim, device) for rope in build.ropes]
        self._attention = attention
        self.mixtures = {
            layer: built.mlp
            for layer, built in zip(own.layers, self.layers.values(), strict=True)
            if isinstance(built.mlp, MixtureOfExperts)
        }
        self._none = torch.empty((0, spec.hidden_size), dtype=dtype, device=device)

    @torch.inference_mode()
    def forward(self, batch: Batch, hidden: Tensor | None, cache: KVCaches | KVCache) -> Tensor:
        """This stage's layers. `hidden` is what the same tp rank of the previous stage returned (None on the first).

        Returns [tokens, hidden] on the last stage, on the others the rank's own tokens of it (`Regions.own`), which is all
        that the next stage needs of this rank. Writes the step's keys and values to `cache`.
        """
        region, rotations = self.regions.of(batch.query_lens), [rope.of(batch) for rope in self._ropes]
        paged = {kind: Paged(part, self._attention.prepare(batch, part)) for kind, part in cache.parts.items()}
        step = Step(rotations, paged, region, self.exchanges.of(batch.lanes))
        hidden = self.embed(batch.token_ids, hidden, region)
        for layer in self.layers.values():
            hidden = layer(hidden, step)
        return self._leave(hidden, region)

    @torch.inference_mode()
    def serve(self, lanes: Lanes) -> None:
        """Run this stage's experts for the tokens of other lanes, in a step in which this rank's lane has none."""
        exchange = self.exchanges.of(lanes)
        for experts in self.mixtures.values():
            exchange.serve(experts, self._none)

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """[rows, own vocabulary] fp32 from rows of the last stage's `forward`; padding ids get -inf."""
        return self.head(self.norm(rows))  # type: ignore[no-any-return]


def _all_tokens(hidden: Tensor, region: Region) -> Tensor:
    """What leaves the last stage: its head wants rows of any token."""
    return region.gather(hidden)


def _own_tokens(hidden: Tensor, region: Region) -> Tensor:
    """What leaves an earlier stage: together the ranks hold every token once."""
    return region.slice(hidden)


class ReceivedHidden(nn.Module):
    """Stands where the first stage has its embedding: the hidden states come from the previous stage."""

    def forward(self, token_ids: Tensor, received: Tensor, region: Region) -> Tensor:
        return region.join(received)


class NoHead(nn.Module):
    """Stands where the last stage has its head."""

    def __init__(self, own: Shard) -> None:
        super().__init__()
        self._own = own

    def forward(self, hidden: Tensor) -> Tensor:
        raise RuntimeError(f"logits were asked of the stage with layers {self._own.layers}: only the last stage has the head")


class Layer(nn.Module):
    """One transformer layer. Which of the four norms a model has is decided where it is built; the others do nothing."""

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
        hidden = hidden + self.attn_out_norm(self.attn(self.input_norm(hidden), step))
        return hidden + self.mlp_out_norm(self.mlp(self.post_norm(hidden), step))  # type: ignore[no-any-return]


class GroupedAttention(nn.Module):
    """Grouped-query attention over this rank's heads, with rotary positions and a paged cache."""

    def __init__(
        self,
        spec: ModelSpec,
        own: Shard,
        layer: int,
        rope: int,
        backend: AttentionBackend,
        qkv: ColumnParallel,
        o: RowParallel,
        sinks: nn.Parameter | None,
    ) -> None:
        super().__init__()
        self.qkv, self.o, self.sinks = qkv, o, sinks
        self._rope, self._kind = rope, spec.kind_of(layer)
        kind, (q_heads, kv_heads) = spec.kinds[self._kind], own.heads[self._kind]
        self._q_heads, self._kv_heads = len(q_heads), len(kv_heads)
        self._key_dim, self._value_dim = kind.key_dim, kind.value_dim
        self._scale, self._softcap = spec.scores_scale, spec.attention_softcap
        self._layer, self._window, self._backend = layer, spec.windows[layer], backend

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """What the rank holds of [tokens, hidden], before and after."""
        projected, rotated = self.qkv(x, step.region), self._q_heads + self._kv_heads
        qk, v = projected.tensor_split((rotated * self._key_dim,), 1)
        qk, v = qk.view(-1, rotated, self._key_dim), self._valued(v.view(-1, self._kv_heads, self._value_dim))
        q, k = self._split(step.rotations[self._rope](self._normed(qk)))
        paged, scores = step.paged[self._kind], (self._window, self._scale, self._softcap, self.sinks)
        out = self._backend.attend(q, k, v, paged.cache, self._layer, paged.plan, *scores)
        return self.o(out.flatten(1), step.region)  # type: ignore[no-any-return]

    def _normed(self, qk: Tensor) -> Tensor:
        """Query and key heads [tokens, q_heads + kv_heads, head_dim] as they go into the rotation."""
        return qk

    def _valued(self, v: Tensor) -> Tensor:
        """Value heads [tokens, kv_heads, value_dim] as they go into the cache."""
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

    def _normed(self, qk: Tensor) -> Tensor:
        q, k = self._split(qk)
        return torch.cat((self.q_norm(q), self.k_norm(k)), 1)


class WidthNormedAttention(GroupedAttention):
    """`GroupedAttention` with RMS norms over all query heads and over all key heads, wherever they are (OLMo-2)."""

    def __init__(self, spec: ModelSpec, own: Shard, *parts: Any, q_norm: WidthNorm, k_norm: WidthNorm, group: Group) -> None:
        super().__init__(spec, own, *parts)
        self.q_norm, self.k_norm = q_norm, k_norm
        self._mean_squares = partial(mean_squares, spec=spec, own=own, group=group)

    def _normed(self, qk: Tensor) -> Tensor:
        q, k = self._split(qk)
        q_mean, k_mean = self._mean_squares(q, k)
        return torch.cat((self.q_norm(q, q_mean), self.k_norm(k, k_mean)), 1)


class _Builder:
    """Makes modules around the rows of the shard table; a bias that has no row there is one the model has not."""

    def __init__(
        self,
        spec: ModelSpec,
        own: Shard,
        tp: Group,
        backend: Any,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self._spec, self._own, self._tp, self._backend = spec, own, tp, backend
        self.ropes = list(dict.fromkeys(spec.rope_of(layer) for layer in own.layers))
        self._table = {
            row.name: nn.Parameter(
                torch.empty(row.shape, dtype=torch.float32 if row.fp32 else dtype, device=device), requires_grad=False
            )
            for row in parameters(spec, own)
        }

    def embedding(self) -> VocabularyEmbedding:
        parts = (self._table["embed.weight"], self._own.vocab)
        scale = self._spec.embedding_scale
        return VocabularyEmbedding(*parts) if scale == 1 else ScaledEmbedding(*parts, scale)

    def head(self) -> VocabularyHead:
        """The head; where the model ties it and this stage holds the embedding, on the embedding's own weight."""
        weight = self._table["head.weight"] if "head.weight" in self._table else self._table["embed.weight"]
        parts = (weight, self._own.vocab, self._spec.vocab_size)
        cap = self._spec.logit_softcap
        return VocabularyHead(*parts) if cap is None else CappedHead(*parts, cap)

    def layer(self, index: int) -> Layer:
        at = f"layers.{index}"
        return Layer(
            self.norm(f"{at}.input_norm"),
            self.attention(index, f"{at}.attn"),
            self.norm(f"{at}.attn_out_norm"),
            self.norm(f"{at}.post_norm"),
            self.feed_forward(index, f"{at}.mlp"),
            self.norm(f"{at}.mlp_out_norm"),
        )

    def feed_forward(self, index: int, at: str) -> nn.Module:
        """An MLP, or a mixture of experts where the layer has them."""
        moe = self._spec.moe_of(index)
        if moe is not None:
            return mixture(self._spec, moe, self._own, self._table, at)
        return GatedMLP(self.column(f"{at}.gate_up"), self.row(f"{at}.down"), ACTIVATIONS[self._spec.activation])

    def attention(self, index: int, at: str) -> nn.Module:
        spec, own, rope = self._spec, self._own, self.ropes.index(self._spec.rope_of(index))
        if spec.mla is not None:
            return latent_attention(spec.mla, self._table, at, spec.scores_scale, index, rope, self._backend)
        parts = (index, rope, self._backend, self.column(f"{at}.qkv"), self.row(f"{at}.o"), self._table.get(f"{at}.sinks"))
        if spec.qk_norm == "head":
            return NormedAttention(spec, own, *parts, q_norm=self.norm(f"{at}.q_norm"), k_norm=self.norm(f"{at}.k_norm"))
        if spec.qk_norm == "width":
            q_norm, k_norm = (WidthNorm(self._table[f"{at}.{name}.weight"], spec.norm_eps) for name in ("q_norm", "k_norm"))
            return WidthNormedAttention(spec, own, *parts, q_norm=q_norm, k_norm=k_norm, group=self._tp)
        return (GroupedAttention if spec.value_scale == 1 else ScaledValueAttention)(spec, own, *parts)

    def column(self, name: str) -> ColumnParallel:
        return ColumnParallel(self._table[f"{name}.weight"], self._table.get(f"{name}.bias"))

    def row(self, name: str) -> RowParallel:
        return RowParallel(self._table[f"{name}.weight"], self._table.get(f"{name}.bias"))

    def norm(self, name: str) -> nn.Module:
        if f"{name}.weight" not in self._table:
            return nn.Identity()
        weight, eps, offset = self._table[f"{name}.weight"], self._spec.norm_eps, self._spec.norm_offset
        return RMSNorm(weight, eps) if offset == 0 else OffsetRMSNorm(weight, eps, offset)
