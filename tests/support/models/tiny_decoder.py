"""Runs a decoder of any dense layout over given sequences, in any schedule of steps, and returns every token's logits.

The tp ranks are threads. Each runs its stages one after the other, so a stage's output is handed on without a wire.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.groups.group import Group
from actors.groups.solo import SoloGroup
from actors.groups.thread import run_ranks, thread_groups
from actors.model.attention.backend import AttentionBackend
from actors.model.attention.cpu.backend import CpuAttention
from actors.model.attention_selection import choose_latent
from actors.model.checkpoint.load import landing
from actors.model.decoder import Decoder
from actors.model.kv.kv_caches import KVCaches
from actors.model.latent.backend import LatentBackend
from actors.model.step.batch import Batch
from placement.layout.layout import Layout
from placement.layout.mesh import Coords
from placement.model.spec import ModelSpec
from placement.ownership.shard import Shard
from placement.ownership.shards import parameters, shard
from tests.support.models.tiny_models import TinyModel

Part = tuple[int, int, int]
"""(sequence, start, count): run the tokens ``[start, start + count)`` of a sequence."""
Schedule = list[list[Part]]


def whole(sequences: list[list[int]]) -> Schedule:
    """Everything in one step."""
    return [[(index, 0, len(tokens)) for index, tokens in enumerate(sequences)]]


def chunked(sequences: list[list[int]], size: int, decode: int = 0) -> Schedule:
    """Sequence after sequence in chunks of `size`, the last `decode` tokens one by one and all sequences together."""
    prompts = [len(tokens) - decode for tokens in sequences]
    prefill = [
        [(index, start, min(size, prompt - start))] for index, prompt in enumerate(prompts) for start in range(0, prompt, size)
    ]
    return prefill + [[(index, prompt + step, 1) for index, prompt in enumerate(prompts)] for step in range(decode)]


def mixed(sequences: list[list[int]], seed: int = 0) -> Schedule:
    """Every step runs a random chunk (often a single token) of a random choice of sequences."""
    rng = random.Random(seed)
    done = [0] * len(sequences)
    schedule: Schedule = []
    while any(at < len(tokens) for at, tokens in zip(done, sequences, strict=True)):
        step = []
        for index, tokens in enumerate(sequences):
            count = min(rng.choice([0, 1, 1, 1, 2, 5, 11]), len(tokens) - done[index])
            if count:
                step.append((index, done[index], count))
                done[index] += count
        schedule.append(step)
    return schedule


@dataclass(frozen=True)
class Pages:
    """How the block tables are laid out."""

    block_size: int = 4
    consecutive: bool = False

    def tables(self, sequences: list[list[int]]) -> list[list[int]]:
        """Block tables that hold every sequence; block 0 belongs to nobody."""
        needs = [-(-len(tokens) // self.block_size) for tokens in sequences]
        blocks = list(range(1, sum(needs) + 1))
        if not self.consecutive:
            random.Random(7).shuffle(blocks)
        return [[blocks.pop(0) for _ in range(need)] for need in needs]


SHUFFLED = Pages()


def run(
    model: TinyModel,
    layout: Layout,
    sequences: list[list[int]],
    schedule: Schedule,
    pages: Pages = SHUFFLED,
    make_attention: Callable[[], AttentionBackend | LatentBackend] | None = None,
    scatter_from: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """Logits [tokens, vocab] of every sequence, under `layout` (pp and tp). `scatter_from`: see `Decoder`.

    `make_attention`: not given, the CPU's own.
    """
    groups = [SoloGroup("tp")] if layout.tp == 1 else thread_groups(layout.tp, "tp")

    def rank(group: Group) -> list[Tensor]:
        stages = [
            stage(
                model,
                layout,
                Coords(pp, 0, 0, group.rank),
                group,
                make_attention() if make_attention else cpu_attention(model.spec),
                scatter_from,
                dtype,
                device,
            )
            for pp in range(layout.pp)
        ]
        return _run_rank(model.spec, stages, sequences, schedule, pages, dtype, device)

    locals_ = [rank(groups[0])] if layout.tp == 1 else run_ranks(groups, rank)
    joined = [torch.cat(parts, -1) for parts in zip(*locals_, strict=True)]
    assert all(torch.isneginf(logits[:, model.spec.vocab_size :]).all() for logits in joined)
    return [logits[:, : model.spec.vocab_size] for logits in joined]


def cpu_attention(spec: ModelSpec) -> AttentionBackend | LatentBackend:
    """The attention of a rank that holds all positions."""
    return CpuAttention() if spec.mla is None else choose_latent(spec.mla, "cpu", torch.float32, 16)


def stage(
    model: TinyModel,
    layout: Layout,
    coords: Coords,
    group: Group,
    attention: AttentionBackend | LatentBackend,
    scatter_from: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Shard, Decoder]:
    """One rank's decoder, filled from the model's weights through the shard table."""
    own = shard(model.spec, layout, coords)
    decoder = Decoder(model.spec, own, group, attention, dtype, device, scatter_from)
    fill(decoder, model, own)
    return own, decoder


def fill(decoder: Decoder, model: TinyModel, own: Shard) -> None:
    """Copy every slice of every parameter; raises on a slice that does not fit."""
    targets, state = dict(decoder.named_parameters()), model.state
    for parameter in parameters(model.spec, own):
        target = targets[parameter.name].zero_()
        for weight_slice in parameter.slices:
            source = state[weight_slice.source]
            assert tuple(source.shape) == weight_slice.source_shape
            matrix = source if weight_slice.source_slot is None else source[weight_slice.source_slot]
            landing(target, weight_slice).copy_(matrix.index_select(weight_slice.dim, torch.tensor(weight_slice.take)))


def batch_of(
    parts: list[Part],
    sequences: list[list[int]],
    tables: list[list[int]],
    block_size: int,
    device: torch.device | str = "cpu",
) -> Batch:
    """The batch of one step; logits are wanted of every token."""
    places = [(index, position) for index, start, count in parts for position in range(start, start + count)]
    slots = [tables[index][position // block_size] * block_size + position % block_size for index, position in places]

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Batch(
        token_ids=tensor([sequences[index][position] for index, position in places]),
        positions=tensor([position for _, position in places]),
        slots=tensor(slots),
        query_lens=[count for _, _, count in parts],
        context_lens=[start for _, start, _ in parts],
        block_tables=[tables[index][: -(-(start + count) // block_size)] for index, start, count in parts],
        output_rows=torch.arange(len(places), device=device),
        rope_lens=[len(sequences[index]) for index, _, _ in parts],
    )


def _run_rank(
    spec: ModelSpec,
    stages: list[tuple[Shard, Decoder]],
    sequences: list[list[int]],
    schedule: Schedule,
    pages: Pages,
    dtype: torch.dtype,
    device: torch.device | str,
) -> list[Tensor]:
    tables = pages.tables(sequences)
    blocks = 1 + sum(len(table) for table in tables)
    caches = [KVCaches.of(spec, own, blocks, pages.block_size, dtype, device) for own, _ in stages]
    collected: list[list[Tensor]] = [[] for _ in sequences]
    for parts in schedule:
        batch = batch_of(parts, sequences, tables, pages.block_size, device)
        hidden = None
        for (_, decoder), cache in zip(stages, caches, strict=True):
            hidden = decoder(batch, hidden, cache)
        logits = stages[-1][1].logits(hidden[batch.output_rows])
        for (index, _, _), rows in zip(parts, _split(logits, parts), strict=True):
            collected[index].append(rows)
    return [torch.cat(rows) for rows in collected]


def _split(logits: Tensor, parts: list[Part]) -> Iterator[Tensor]:
    return iter(logits.split([count for _, _, count in parts]))
