"""The decoder: one pipeline stage of one tensor-parallel (TP) rank, composed from the model's spec and the rank's shard.

    first stage                                                    last stage
    token ids -> embed -> [layer]*  -> hidden -> ... -> [layer]* -> norm -> head -> logits of own vocabulary rows

    layer:  hidden + attn_out_norm(attn(input_norm(hidden))),  then  hidden + mlp_out_norm(mlp(post_norm(hidden)))
            (a norm that the model does not have is the identity)

The stage's parts are fixed when it is built: `forward` does not branch on the stage. The parameters are exactly those of
`placement.ownership.shards.parameters`, uninitialised; a loader fills them in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from actors.groups.group import Group
from actors.model.attention.backend import AttentionBackend
from actors.model.build import Builder
from actors.model.decode_programs import DecodePrograms
from actors.model.kv.kv_cache import KVCache
from actors.model.kv.kv_caches import KVCaches
from actors.model.latent.backend import LatentBackend
from actors.model.moe.block import MixtureOfExperts
from actors.model.moe.dispatch_selection import Exchanges, OnlySums
from actors.model.step.batch import Batch
from actors.model.step.regions import Region, Regions
from actors.model.step.rope import make_rope
from actors.model.step.step import Paged, Step
from placement.model.spec import ModelSpec
from placement.ownership.expert_tokens import NewLensAcrossDP
from placement.ownership.shard import Shard


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
        """Build the stage.

        `scatter_from` is the number of prompt tokens from which a step runs sequence parallel
        (`placement.layout.sequence_parallel`). `exchanges` dispatches tokens to the experts, where these are not all in the tp
        group.
        """
        super().__init__()
        build = Builder(spec, own, tp, attention, dtype, device)
        self.embed = build.embedding() if own.first_stage else ReceivedHidden()
        self.layers = nn.ModuleDict({str(layer): build.layer(layer) for layer in own.layers})
        self.norm = build.norm("norm") if own.last_stage else nn.Identity()
        self.head = build.head() if own.last_stage else NoHead(own)
        self.regions = Regions(tp, scatter_from)
        self.exchanges = exchanges or OnlySums()
        self._leave = _all_tokens if own.last_stage else _own_tokens
        self._ropes = [make_rope(rope, spec.rotary_dim, device) for rope in build.ropes]
        self._attention = attention
        self.mixtures = {
            layer: built.mlp
            for layer, built in zip(own.layers, self.layers.values(), strict=True)
            if isinstance(built.mlp, MixtureOfExperts)
        }
        self._programs = DecodePrograms(self.layers, attention)
        self._none = torch.empty((0, spec.hidden_size), dtype=dtype, device=device)

    @torch.inference_mode()
    def forward(self, batch: Batch, hidden: Tensor | None, cache: KVCaches | KVCache) -> Tensor:
        """Run this stage's layers on the tokens of `batch`. `hidden` is what the same tp rank of the previous stage returned
        (None on the first stage). Writes the step's keys and values to `cache`. A collective of the rank's tp, cp, dcp and
        expert groups.

        Returns [tokens, hidden] on the last stage. Other stages return the rank's own tokens of it (`Regions.own`), which is
        all that the next stage needs from this rank.
        """
        region, rotations = self.regions.of(batch.query_lens), [rope.of(batch) for rope in self._ropes]
        exchange = self.exchanges.of(batch.new_lens_across_dp, batch.copy_offset)
        hidden = self.embed(batch.token_ids, hidden, region)
        if self._programs.takes(batch, hidden, rotations, region):
            out = self._programs.run(batch, hidden, rotations, cache.parts, region, exchange)
            if out is not None:
                return self._leave(out, region)
        paged = {kind: Paged(part, self._attention.prepare(batch, part)) for kind, part in cache.parts.items()}
        step = Step(rotations, paged, region, exchange)
        for layer in self.layers.values():
            hidden = layer(hidden, step)
        return self._leave(hidden, region)

    def watch(self, ranges: Iterable[range], ran: Callable[[range], None]) -> None:
        """Call `ran` with each of `ranges` of this stage's layers after its last layer has run (on a device: has been queued),
        in every later step. Raises `KeyError` if that layer is not in this stage.

        Steps cost nothing more where nothing is watched.
        """
        for layers in ranges:
            self.layers[str(layers[-1])].register_forward_hook(_then(ran, layers))

    @torch.inference_mode()
    def serve(self, new_lens_across_dp: NewLensAcrossDP, copy_offset: int) -> Tensor:
        """Run this stage's experts for the tokens of other DP ranks, in a step in which this DP rank has no tokens, and take
        part in the collectives of expert parallelism. The arguments are the fields of `Batch` with these names.

        Returns an empty tensor [0, hidden].
        """
        exchange = self.exchanges.of(new_lens_across_dp, copy_offset)
        for experts in self.mixtures.values():
            exchange.serve(experts, self._none)
        return self._none

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """Return fp32 logits [rows, own vocabulary] of `rows` [rows, hidden], rows of the last stage's `forward`. Padding ids
        have -inf. Raises `RuntimeError` on another stage."""
        return self.head(self.norm(rows))  # type: ignore[no-any-return]


def _then(ran: Callable[[range], None], layers: range) -> Callable[..., None]:
    def hook(*_: object) -> None:
        ran(layers)

    return hook


def _all_tokens(hidden: Tensor, region: Region) -> Tensor:
    """Return the output of the last stage: all tokens, because the head may need any of them."""
    return region.gather(hidden)


def _own_tokens(hidden: Tensor, region: Region) -> Tensor:
    """Return the output of an earlier stage: the rank's own tokens. The ranks together hold every token once."""
    return region.slice(hidden)


class ReceivedHidden(nn.Module):
    """Replaces the embedding on all stages but the first: hidden states come from the previous stage."""

    def forward(self, token_ids: Tensor, received: Tensor, region: Region) -> Tensor:
        """Return this rank's part of the hidden states in `region`, from the own tokens `received` [own, hidden] from the
        previous stage. `token_ids` is unused."""
        return region.join(received)


class NoHead(nn.Module):
    """Replaces the head on all stages but the last."""

    def __init__(self, own: Shard) -> None:
        super().__init__()
        self._own = own

    def forward(self, hidden: Tensor) -> Tensor:
        """Always raises `RuntimeError`: this stage has no head."""
        raise RuntimeError(f"the stage with layers {self._own.layers} cannot compute logits: only the last stage has the head")
