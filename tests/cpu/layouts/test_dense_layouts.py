"""Every dense layout computes what one rank computes."""

from __future__ import annotations

import random

import pytest
import torch

from actors.groups.group import Group
from actors.groups.solo import SoloGroup
from actors.groups.thread import run_ranks, thread_groups
from actors.model.attention.cpu.backend import CpuAttention
from actors.model.decoder import Decoder
from placement.layout.layout import Layout
from placement.layout.mesh import Coords, coords_of
from placement.ownership.shards import parameters, shard
from tests.support.long_cases import long
from tests.support.models.tiny_decoder import batch_of, chunked, fill, mixed, run, whole
from tests.support.models.tiny_models import FAMILIES, tiny

torch.set_num_threads(1)

ONE = Layout()
WIDTHS = [{"tp": 2}, {"tp": 3}, {"tp": 4}, {"tp": 5}]
"""The tiny models have 6 query heads and 2 KV heads: from 3 ranks on, ranks share a KV head."""
DEPTHS = [{"pp": 2}, {"pp": 3}, {"pp": 4}]
PRODUCTS = [{"tp": 2, "pp": 2}, {"tp": 3, "pp": 2}, {"tp": 5, "pp": 3}]


def sequences_of(*lengths: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(101) for _ in range(length)] for length in lengths]


SEQUENCES = sequences_of(1, 9, 20, 37)
SCHEDULE = mixed(SEQUENCES, 1)


@pytest.mark.parametrize("sizes", WIDTHS + DEPTHS + PRODUCTS, ids=str)
@pytest.mark.parametrize("family", ["llama2", *long("qwen2_alternating", "qwen3")])
def test_a_layout_equals_one_rank(family: str, sizes: dict[str, int]) -> None:
    model = tiny(family, tied=family == "qwen3")
    expected = run(model, ONE, SEQUENCES, SCHEDULE)
    for logits, reference in zip(run(model, Layout(**sizes), SEQUENCES, SCHEDULE), expected, strict=True):
        torch.testing.assert_close(logits, reference, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 3}, {"tp": 4}, {"pp": 2}], ids=str)
@pytest.mark.parametrize(
    "family",
    [
        "smollm3",
        "olmo2",
        "phi3",
        "glm",
        "glm4",
        "gemma2",
        "gemma3",
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
        "gpt_oss",
        "glm4_moe",
        "mimo_v2",
    ],
)
def test_a_layout_equals_transformers(family: str, sizes: dict[str, int]) -> None:
    model = tiny(family)
    for tokens, logits in zip(SEQUENCES, run(model, Layout(**sizes), SEQUENCES, SCHEDULE), strict=True):
        torch.testing.assert_close(logits, model.logits(tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sizes", [*DEPTHS, {"pp": 2, "stage_layers": (3, 1)}], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_stages_are_bit_identical_to_one_stage(tied: bool, sizes: dict[str, int]) -> None:
    model = tiny("llama2", tied=tied)
    expected = run(model, ONE, SEQUENCES, SCHEDULE)
    assert all(map(torch.equal, run(model, Layout(**sizes), SEQUENCES, SCHEDULE), expected))


@pytest.mark.parametrize("sizes", [{"tp": 2, "pp": 2}, {"tp": 3, "pp": 3}], ids=str)
def test_stages_that_send_slices_are_bit_identical_to_one_stage(sizes: dict[str, int]) -> None:
    model = tiny("llama2")
    expected = run(model, Layout(tp=sizes["tp"]), SEQUENCES, SCHEDULE)
    assert all(map(torch.equal, run(model, Layout(**sizes), SEQUENCES, SCHEDULE), expected))


def test_more_stages_than_even_layers() -> None:
    model = tiny("llama2", num_hidden_layers=5)
    expected = [model.logits(tokens) for tokens in SEQUENCES]
    for pp in (2, 3, 5):
        for logits, reference in zip(run(model, Layout(pp=pp), SEQUENCES, whole(SEQUENCES)), expected, strict=True):
            torch.testing.assert_close(logits, reference, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 4}, {"tp": 2, "pp": 2}], ids=str)
def test_large_row_parallel_biases_are_added_once(sizes: dict[str, int]) -> None:
    model = tiny("llama_biases", bias=10.0)
    expected = run(model, ONE, SEQUENCES, SCHEDULE)
    for logits, reference in zip(run(model, Layout(**sizes), SEQUENCES, SCHEDULE), expected, strict=True):
        torch.testing.assert_close(logits, reference, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4, 5])
def test_a_prime_vocabulary_loses_and_gains_no_id(tp: int, tied: bool) -> None:
    # `run` asserts that the padding rows are -inf, and only then drops them.
    model = tiny("llama2", tied=tied)
    for tokens, logits in zip(SEQUENCES, run(model, Layout(tp=tp), SEQUENCES, whole(SEQUENCES)), strict=True):
        assert logits.shape[1] == 101
        assert not torch.isinf(logits).any()
        torch.testing.assert_close(logits, model.logits(tokens), atol=1e-4, rtol=1e-4)


def test_the_same_layout_twice_gives_the_same_bits() -> None:
    model, layout = tiny("llama2"), Layout(tp=3)
    assert all(map(torch.equal, run(model, layout, SEQUENCES, SCHEDULE), run(model, layout, SEQUENCES, SCHEDULE)))


@pytest.mark.parametrize("layout", [ONE, Layout(tp=2), Layout(tp=5, pp=2), Layout(pp=4)], ids=lambda layout: repr(layout.tp))
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_holds_exactly_the_rows_of_the_shard_table(family: str, tied: bool, layout: Layout) -> None:
    spec = tiny(family, tied=tied).spec
    for rank in range(layout.world):
        own = shard(spec, layout, coords_of(layout, rank))
        decoder = Decoder(spec, own, SoloGroup("tp"), CpuAttention(), torch.float32)
        held = {name: tuple(weight.shape) for name, weight in decoder.named_parameters()}
        assert held == {row.name: row.shape for row in parameters(spec, own)}
        assert not any(weight.requires_grad for weight in decoder.parameters())


def test_logits_of_an_earlier_stage_are_refused() -> None:
    spec, layout = tiny("llama2").spec, Layout(pp=2)
    decoder = Decoder(spec, shard(spec, layout, Coords(0, 0, 0, 0)), SoloGroup("tp"), CpuAttention(), torch.float32)
    with pytest.raises(RuntimeError, match="last stage"):
        decoder.logits(torch.zeros(1, spec.hidden_size))


def test_a_forward_makes_two_sums_a_layer_and_one_for_the_embedding() -> None:
    model, layout = tiny("llama2"), Layout(tp=2)
    groups = thread_groups(2, "tp")

    def rank(group: Group) -> int:
        from actors.model.kv.kv_cache import KVCache

        own = shard(model.spec, layout, Coords(0, 0, 0, group.rank))
        decoder = Decoder(model.spec, own, group, CpuAttention(), torch.float32)
        fill(decoder, model, own)
        cache = KVCache(own.layers, len(own.kv_heads), 4, 4, model.spec.head_dim, torch.float32)
        hidden = decoder(batch_of([(0, 0, 9)], [SEQUENCES[1]], [[3, 1, 2]], 4), None, cache)
        decoder.logits(hidden)
        return group.calls["all_reduce"]

    assert run_ranks(groups, rank) == [2 * model.spec.num_layers + 1] * 2


def test_a_row_does_not_depend_on_its_neighbours_in_the_batch() -> None:
    model = tiny("llama2")
    together = run(model, ONE, SEQUENCES, chunked(SEQUENCES, 1000, decode=1))
    for tokens, logits in zip(SEQUENCES[1:], together[1:], strict=True):
        alone = run(model, ONE, [tokens], chunked([tokens], 1000, decode=1))[0]
        torch.testing.assert_close(alone, logits, atol=1e-5, rtol=1e-5)
