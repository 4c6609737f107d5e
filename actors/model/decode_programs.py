"""Decode steps on CPU as recorded programs: the layers of a stage in a few calls, instead of a dozen calls a layer.

A step in which every sequence runs one token does the same in every layer, whatever the tokens are. So the layers are recorded
once for a number of rows (`actors.model.kernels.native.program`), on tensors that stay in place, and a step fills these tensors
and runs the record::

    rows of the step      3                                             recorded for 4 rows, 16 blocks
    hidden states         [ a b c . ]         the last row is padding:
    slots                 [ 33 70 5 -1 ]      it is not stored,
    tables, first, stop   [ .. .. .. 0..0 ]   and sees no tokens

There is one decoder: what is recorded is `Layer.forward`. A stage that has anything else than compiled kernels in its layers
(experts, latent attention, other types than bfloat16) is not recorded, and runs as usual.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from actors.model.attention.cpu.backend import CpuAttention
from actors.model.attention.cpu.paged import StaticDecode
from actors.model.kernels.native.library import library
from actors.model.kernels.native.program import NotRecordable, Program
from actors.model.kv.kv_cache import KVCache
from actors.model.layers.layer import GroupedAttention, Layer
from actors.model.layers.layers import GatedMLP
from actors.model.step.batch import Batch
from actors.model.step.exchange import Exchange
from actors.model.step.regions import Region, Replicated
from actors.model.step.rope import Rotate, Rotation, unrotated
from actors.model.step.step import Paged, Step

log = logging.getLogger("shardwright.decode")

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 128)
"""Numbers of rows for which programs are recorded; larger steps run as usual."""
_LEAST_BLOCKS = 16


@dataclass(frozen=True)
class _Recorded:
    """One program and the tensors that it reads."""

    program: Program
    hidden: Tensor
    rotations: Sequence[Rotate]
    plans: Mapping[int, StaticDecode]

    def fill(self, batch: Batch, hidden: Tensor, rotations: Sequence[Rotate], caches: Mapping[int, KVCache]) -> None:
        """Copy the inputs of a step to the tensors of the program."""
        rows = len(hidden)
        self.hidden[:rows] = hidden
        for own, of_step in zip(self.rotations, rotations, strict=True):
            if isinstance(own, Rotation) and isinstance(of_step, Rotation):
                own.cos[:rows], own.sin[:rows] = of_step.cos, of_step.sin
        for kind, plan in self.plans.items():
            plan.fill(batch, caches[kind].block_size)


class DecodePrograms:
    """The recorded decode steps of one pipeline stage."""

    def __init__(self, layers: nn.ModuleDict, attention: object) -> None:
        self._layers: list[Any] = list(layers.values())
        self._recordable = type(attention) is CpuAttention and all(_is_dense(layer) for layer in self._layers)
        self._windows: defaultdict[int, set[int | None]] = defaultdict(set)
        for layer in self._layers if self._recordable else ():
            self._windows[layer.attn.kind].add(layer.attn.params.window)
        self._caches: Mapping[int, KVCache] = {}
        """The pages that the programs read and write."""
        self._recorded: dict[tuple[int, int], _Recorded] = {}

    def takes(self, batch: Batch, hidden: Tensor, rotations: Sequence[Rotate], region: Region) -> bool:
        """Whether the layers of this step can be run as a program: one token a sequence, on this rank's own kernels."""
        if not self._recordable or hidden.dtype is not torch.bfloat16 or len(hidden) > _SIZES[-1]:
            return False
        native = library(hidden)
        return (
            native is not None
            and native.packs
            and isinstance(region, Replicated)
            and all(new == 1 for new in batch.query_lens)
            and all(isinstance(rotate, Rotation) or rotate is unrotated for rotate in rotations)
            and not any(layer._forward_hooks for layer in self._layers)
        )

    def run(
        self,
        batch: Batch,
        hidden: Tensor,
        rotations: Sequence[Rotate],
        caches: Mapping[int, KVCache],
        region: Region,
        exchange: Exchange,
    ) -> Tensor | None:
        """Run the layers on `hidden` [rows, hidden], the input of the first one, and return their output. `caches` are the
        pages by attention kind. Returns None if the layers cannot be recorded: they have to be run as usual, now and later."""
        rows = len(hidden)
        size = next(size for size in _SIZES if size >= rows)
        blocks = max(_LEAST_BLOCKS, 1 << (max(len(table) for table in batch.block_tables) - 1).bit_length())
        if any(self._caches.get(kind) is not cache for kind, cache in caches.items()):
            self._recorded.clear()
            self._caches = dict(caches)
        recorded = self._recorded.get((size, blocks))
        if recorded is not None:
            recorded.fill(batch, hidden, rotations, caches)
            return recorded.program.run()[:rows].clone()
        native = library(hidden)
        assert native is not None
        recorded = _Recorded(
            Program(native),
            hidden.new_zeros(size, hidden.shape[1]),
            [_kept(rotate, size) for rotate in rotations],
            {kind: StaticDecode(size, blocks, self._windows[kind]) for kind in caches},
        )
        paged = {kind: Paged(cache, recorded.plans[kind]) for kind, cache in caches.items()}
        recorded.fill(batch, hidden, rotations, caches)
        try:
            out = recorded.program.record(
                lambda: self._through(recorded.hidden, Step(recorded.rotations, paged, region, exchange))
            )
        except NotRecordable as error:
            log.info("decode steps are not recorded: %s", error)
            self._recordable = False
            return None
        self._recorded[size, blocks] = recorded
        return out[:rows].clone()

    def _through(self, hidden: Tensor, step: Step) -> Tensor:
        for layer in self._layers:
            hidden = layer(hidden, step)
        return hidden


def _is_dense(layer: nn.Module) -> bool:
    return isinstance(layer, Layer) and isinstance(layer.attn, GroupedAttention) and isinstance(layer.mlp, GatedMLP)


def _kept(rotate: Rotate, rows: int) -> Rotate:
    """Return a rotation like `rotate`, with angles of its own for `rows` rows."""
    if not isinstance(rotate, Rotation):
        return rotate
    return Rotation(*(angles.new_zeros(rows, *angles.shape[1:]) for angles in (rotate.cos, rotate.sin)))
