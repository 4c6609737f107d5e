"""Norms and residual sums scattered over the tp group: the same numbers, the same bytes, twice the collectives."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from actors.groups.group import Group
from actors.groups.thread import run_ranks, thread_groups
from actors.model.attention.cpu.backend import CpuAttention
from actors.model.decoder import Decoder
from actors.model.kv.kv_cache import KVCache
from placement.layout import sequence_parallel
from placement.layout.layout import Layout
from placement.layout.mesh import Coords
from placement.ownership.shards import shard
from tests.cpu.layouts.test_dense_layouts import SCHEDULE, SEQUENCES
from tests.support.long_cases import long
from tests.support.models.tiny_decoder import batch_of, fill, run
from tests.support.models.tiny_models import TinyModel, tiny

torch.set_num_threads(1)

LAYOUTS = [{"tp": 3}, *long({"tp": 2, "pp": 2}), {"tp": 4, "pp": 3}]


@pytest.mark.parametrize("scatter_from", [0, 12], ids=["every step", "long steps"])
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", ["llama_biases", "gemma2", *long("qwen3", "olmo2")])
def test_scattering_changes_no_bit(family: str, sizes: dict[str, int], scatter_from: int) -> None:
    model, layout = tiny(family, bias=10.0, tied=family == "qwen3"), Layout(**sizes)
    whole = run(model, layout, SEQUENCES, SCHEDULE)
    scattered = run(model, layout, SEQUENCES, SCHEDULE, scatter_from=scatter_from)
    assert all(map(torch.equal, scattered, whole))
    for logits, reference in zip(scattered, run(model, Layout(), SEQUENCES, SCHEDULE), strict=True):
        torch.testing.assert_close(logits, reference, atol=1e-4, rtol=1e-4)


def counted(model: TinyModel, layout: Layout, tokens: int, scatter_from: int | None) -> list[tuple[Counter[str], int, int]]:
    """Of each tp rank, one forward of a single stage: calls by operation, bytes sent, rows its norms saw at most."""

    def rank(group: Group) -> tuple[Counter[str], int, int]:
        own, rows = shard(model.spec, layout, Coords(0, 0, 0, group.rank)), []
        decoder = Decoder(model.spec, own, group, CpuAttention(), torch.float32, scatter_from=scatter_from)
        fill(decoder, model, own)
        for layer in decoder.layers.values():
            for norm in (layer.input_norm, layer.post_norm):
                norm.register_forward_pre_hook(lambda module, inputs: rows.append(inputs[0].shape[0]))
        cache = KVCache(own.layers, len(own.kv_heads), 8, 4, model.spec.head_dim, torch.float32)
        decoder(batch_of([(0, 0, tokens)], [list(range(tokens))], [list(range(8))], 4), None, cache)
        return group.calls, group.sent_bytes.total(), max(rows)

    return run_ranks(thread_groups(layout.tp, "tp"), rank)


@pytest.mark.parametrize(("tp", "tokens"), [(2, 24), (3, 25), (4, 23)])
def test_two_gathers_and_two_scatters_a_layer_send_the_bytes_of_two_sums(tp: int, tokens: int) -> None:
    model, layout = tiny("llama2"), Layout(tp=tp)
    layers = model.spec.num_layers
    whole = counted(model, layout, tokens, None)
    scattered = counted(model, layout, tokens, 0)
    parts = [tokens // tp + (rank < tokens % tp) for rank in range(tp)]
    for calls, _, rows in whole:
        assert (calls, rows) == (Counter(all_reduce=2 * layers + 1), tokens)
    for (calls, _, rows), own in zip(scattered, parts, strict=True):
        assert (calls, rows) == (Counter(all_gather=2 * layers + 1, reduce_scatter=2 * layers + 1), own)
    # Of uneven parts some send a little more and some a little less: together it is the same to the byte.
    assert sum(sent for _, sent, _ in scattered) == sum(sent for _, sent, _ in whole)


def test_only_steps_with_enough_prompt_tokens_are_scattered() -> None:
    least = sequence_parallel.scatter_from(Layout(tp=2, sp=True))
    assert least == 2 * sequence_parallel.TOKENS_PER_RANK
    assert sequence_parallel.scatter_from(Layout(tp=2)) is None
    assert sequence_parallel.is_scattered([least - 5, 5, 1], least)
    assert not sequence_parallel.is_scattered([least - 1, 1, 1], least), "decodes do not count"
    assert not sequence_parallel.is_scattered([1] * 1000, least)
    assert not sequence_parallel.is_scattered([1000], None)
