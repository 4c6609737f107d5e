"""Who owns which slice: every weight is held exactly by the ranks that should hold it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.layout.layout import Layout
from placement.layout.mesh import Coords, coords_of
from placement.layout.partition import partition, partition_groups
from placement.layout.pipeline_stages import partition_layers
from placement.legality.check import check
from placement.model.spec import ModelSpec
from placement.ownership.shard import Shard
from placement.ownership.shards import columns, heads, parameters, shard, stage_layers, vocabulary, weight_elements
from placement.ownership.weight_slices import Parameter

quick = settings(deadline=None, max_examples=80)


def toy(**changes: object) -> ModelSpec:
    values: dict[str, object] = {
        "family": "llama",
        "hidden_size": 6,
        "num_layers": 5,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 4,
        "intermediate_size": 96,
        "vocab_size": 101,
        "max_position": 64,
        "norm_eps": 1e-5,
    }
    values |= changes
    return ModelSpec(**{"windows": (None,) * int(str(values["num_layers"])), **values})


SMOLLM2 = toy(
    hidden_size=576,
    num_layers=30,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49152,
    tie_embeddings=True,
    max_position=8192,
)


@st.composite
def models_and_layouts(draw: st.DrawFn) -> tuple[ModelSpec, Layout]:
    kv_heads = draw(st.integers(1, 5))
    model = toy(
        num_kv_heads=kv_heads,
        num_heads=kv_heads * draw(st.integers(1, 4)),
        num_layers=draw(st.integers(1, 5)),
        head_dim=draw(st.sampled_from([2, 8, 64])),
        intermediate_size=draw(st.integers(20, 300)),
        vocab_size=draw(st.integers(20, 400)),
        qkv_bias=draw(st.booleans()),
        o_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        qk_norm=draw(st.sampled_from(["none", "head"])),
        tie_embeddings=draw(st.booleans()),
    )
    tp = draw(st.integers(1, model.num_heads))
    shares = st.lists(st.floats(0.01, 100), min_size=tp, max_size=tp).map(tuple)
    return model, Layout(tp=tp, pp=draw(st.integers(1, model.num_layers)), tp_shares=draw(st.none() | shares))


def every_rank(model: ModelSpec, layout: Layout) -> Iterator[tuple[Coords, Shard]]:
    for rank in range(layout.world):
        coords = coords_of(layout, rank)
        yield coords, shard(model, layout, coords)


def holders(model: ModelSpec, layout: Layout) -> dict[str, np.ndarray]:
    """How many ranks hold each index of each checkpoint tensor (along the dimension it is cut)."""
    counts: dict[str, np.ndarray] = {}
    for _, own in every_rank(model, layout):
        for parameter in parameters(model, own):
            for weight_slice in parameter.slices:
                count = counts.setdefault(weight_slice.source, np.zeros(weight_slice.source_shape[weight_slice.dim], dtype=int))
                count[weight_slice.take.start : weight_slice.take.stop] += 1
    return counts


def kv_holders(model: ModelSpec, layout: Layout) -> np.ndarray:
    """How many ranks hold each row of a K or V projection, from the rule: spare ranks are split over the KV heads."""
    each, tp = [1] * model.num_kv_heads, layout.tp
    if tp > model.num_kv_heads:
        each = [tp // model.num_kv_heads + (head < tp % model.num_kv_heads) for head in range(model.num_kv_heads)]
        if layout.tp_shares is not None:
            each = [len(run) for run in partition_groups(model.queries_per_kv, model.num_kv_heads, tp, layout.tp_shares)]
    return np.repeat(each, model.head_dim)


@quick
@given(models_and_layouts())
def test_every_tensor_is_held_by_exactly_the_expected_ranks(case: tuple[ModelSpec, Layout]) -> None:
    model, layout = case
    found = holders(model, layout)
    assert set(found) == set(holders(model, Layout()))
    for name, count in found.items():
        if ".k_proj." in name or ".v_proj." in name:
            expected = kv_holders(model, layout)
        elif "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias")):
            expected = np.array([layout.tp])
        elif name == "model.embed_tokens.weight" and model.tie_embeddings and layout.pp > 1:
            expected = np.array([2])
        else:
            expected = np.array([1])
        assert (count == expected).all(), name


@quick
@given(models_and_layouts())
def test_slices_fill_each_parameter_without_overlap(case: tuple[ModelSpec, Layout]) -> None:
    model, layout = case
    for _, own in every_rank(model, layout):
        for parameter in parameters(model, own):
            filled = np.zeros(parameter.shape[parameter.slices[0].dim], dtype=int)
            for weight_slice in parameter.slices:
                filled[weight_slice.at : weight_slice.at + len(weight_slice.take)] += 1
                rest = [size for dim, size in enumerate(parameter.shape) if dim != weight_slice.dim]
                assert rest == [size for dim, size in enumerate(weight_slice.source_shape) if dim != weight_slice.dim]
            assert filled.max() == 1
            assert (filled == 1).sum() == len(filled) - padding(model, own, parameter)


def padding(model: ModelSpec, own: Shard, parameter: Parameter) -> int:
    """Rows past the true vocabulary: at the end of the embedding and the head."""
    return max(0, own.vocab.stop - model.vocab_size) if parameter.name in ("embed.weight", "head.weight") else 0


@quick
@given(models_and_layouts())
def test_every_rank_has_work_and_its_query_heads_find_their_kv_heads(case: tuple[ModelSpec, Layout]) -> None:
    model, layout = case
    for _, own in every_rank(model, layout):
        assert own.layers
        assert own.q_heads
        assert own.columns
        assert own.vocab.start < min(own.vocab.stop, model.vocab_size)
        assert {head // model.queries_per_kv for head in own.q_heads} == set(own.kv_heads)


@quick
@given(models_and_layouts())
def test_query_heads_columns_and_vocabulary_are_each_split_once_in_order(case: tuple[ModelSpec, Layout]) -> None:
    model, layout = case
    cut = [q_heads for q_heads, _ in heads(model, layout.tp)]
    assert [index for part in cut for index in part] == list(range(model.num_heads))
    assert [index for part in columns(model, layout.tp) for index in part] == list(range(model.intermediate_size))
    rows = [index for part in vocabulary(model, layout.tp) for index in part]
    assert rows == list(range(len(rows)))
    assert len(rows) >= model.vocab_size


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_prime_vocabulary_is_padded_alike_in_embedding_and_head(tp: int, tie: bool) -> None:
    model, layout = toy(tie_embeddings=tie), Layout(tp=tp, pp=2)
    rows: dict[str, list[int]] = {"embed.weight": [], "head.weight": []}
    for _, own in every_rank(model, layout):
        for parameter in parameters(model, own):
            if parameter.name in rows:
                rows[parameter.name].append(parameter.shape[0])
    assert rows["embed.weight"] == rows["head.weight"]
    assert len(rows["head.weight"]) == tp
    assert sum(rows["head.weight"]) in (102, 104)


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_every_layer_is_on_exactly_one_stage(num_stages: int) -> None:
    for num_layers in range(1, 71):
        model, layout = toy(num_layers=num_layers), Layout(pp=num_stages)
        if num_layers < num_stages:
            assert [violation.field for violation in check(layout, model)] == ["pp"]
            continue
        stages = [shard(model, layout, coords_of(layout, stage)).layers for stage in range(num_stages)]
        assert [layer for stage in stages for layer in stage] == list(range(num_layers))
        assert max(map(len, stages)) - min(map(len, stages)) <= 1
        assert len(stages[-1]) == min(map(len, stages))


def test_a_split_of_layers_by_hand_is_kept() -> None:
    layout = Layout(pp=3, stage_layers=(1, 3, 1))
    assert [own.layers for _, own in every_rank(toy(), layout)] == [range(0, 1), range(1, 4), range(4, 5)]


def test_the_head_counts_as_the_layers_it_weighs() -> None:
    """The head of SmolLM2 weighs eight of its layers."""
    assert stage_layers(SMOLLM2, Layout(pp=2)) == (19, 11)
    assert stage_layers(SMOLLM2, Layout(pp=3)) == (12, 13, 5)
    assert stage_layers(SMOLLM2, Layout(pp=4)) == (9, 10, 9, 2)
    assert stage_layers(toy(), Layout(pp=2)) == (3, 2)
    assert stage_layers(toy(num_layers=7), Layout(pp=3)) == (2, 3, 2), "the first stage holds the embedding as well"


@quick
@given(st.lists(st.integers(1, 20), min_size=1, max_size=9).map(tuple), st.data(), st.integers(0, 40), st.integers(0, 40))
def test_no_split_has_a_smaller_largest_stage(layers: tuple[int, ...], data: st.DataObject, embedding: int, head: int) -> None:
    stages = data.draw(st.integers(1, len(layers)))

    def rank(split: tuple[int, ...]) -> tuple[int, int, int]:
        stops = list(accumulate(split))
        reads = [sum(layers[stop - count : stop]) for count, stop in zip(split, stops, strict=True)]
        reads[-1] += head
        holds = [reads[0] + embedding, *reads[1:]]
        return max(reads), sum(each**2 for each in reads), sum(each**2 for each in holds)

    every = [
        tuple(stop - start for start, stop in pairwise((0, *cuts, len(layers))))
        for cuts in combinations(range(1, len(layers)), stages - 1)
    ]
    found = partition_layers(layers, stages, embedding, head)
    assert len(found) == stages
    assert rank(found) == min(map(rank, every))


def test_partition() -> None:
    assert partition(8, 3) == [range(0, 3), range(3, 6), range(6, 8)]


# SmolLM2-135M by hand: 9 query heads in 3 KV groups of 64 dimensions, 1,536 columns, 49,152 rows


def test_smollm2_on_two_ranks() -> None:
    # Rank 0 has one KV group more: 8 x 64 x 576 weights, worth 171 columns of 3 x 576. The nearest in blocks of 64: 128.
    assert heads(SMOLLM2, 2) == [(range(0, 6), range(0, 2)), (range(6, 9), range(2, 3))]
    assert columns(SMOLLM2, 2) == [range(0, 704), range(704, 1536)]
    assert vocabulary(SMOLLM2, 2) == [range(0, 24576), range(24576, 49152)]
    first, second = (weight_elements(SMOLLM2, own) for _, own in every_rank(SMOLLM2, Layout(tp=2)))
    # Norms, qkv, o, gate and up, down of a layer; then embedding and last norm.
    assert first == 30 * (2 * 576 + 640 * 576 + 576 * 384 + 1408 * 576 + 576 * 704) + 24576 * 576 + 576
    assert second == 30 * (2 * 576 + 320 * 576 + 576 * 192 + 1664 * 576 + 576 * 832) + 24576 * 576 + 576


def test_smollm2_on_three_ranks_is_even() -> None:
    assert heads(SMOLLM2, 3) == [(range(3 * rank, 3 * rank + 3), range(rank, rank + 1)) for rank in range(3)]
    assert columns(SMOLLM2, 3) == [range(0, 512), range(512, 1024), range(1024, 1536)]
    assert vocabulary(SMOLLM2, 3) == [range(0, 16384), range(16384, 32768), range(32768, 49152)]


def test_smollm2_on_five_ranks_holds_two_kv_heads_twice() -> None:
    q_heads, kv_heads = zip(*heads(SMOLLM2, 5), strict=True)
    assert q_heads == (range(0, 2), range(2, 3), range(3, 5), range(5, 6), range(6, 9))
    assert kv_heads == (range(0, 1), range(0, 1), range(1, 2), range(1, 2), range(2, 3))
    assert [len(part) for part in columns(SMOLLM2, 5)] == [288, 352, 288, 352, 256]
    assert [len(part) for part in vocabulary(SMOLLM2, 5)] == [9856, 9856, 9856, 9792, 9792]


def test_smollm2_on_two_stages_has_its_tied_embedding_on_both() -> None:
    names = [[parameter.name for parameter in parameters(SMOLLM2, own)] for _, own in every_rank(SMOLLM2, Layout(pp=2))]
    assert names[0][:2] == ["embed.weight", "layers.0.input_norm.weight"]
    assert names[0][-1] == "layers.18.mlp.down.weight"
    assert names[1][0] == "layers.19.input_norm.weight"
    assert names[1][-2:] == ["norm.weight", "head.weight"]
    [head] = [p for _, own in every_rank(SMOLLM2, Layout(pp=2)) for p in parameters(SMOLLM2, own) if p.name == "head.weight"]
    assert head.shape == (49152, 576)
    assert [weight_slice.source for weight_slice in head.slices] == ["model.embed_tokens.weight"]


def test_smollm2_by_shares_of_two_to_one() -> None:
    heads_of, columns_of = heads(SMOLLM2, 2, (2.0, 1.0)), columns(SMOLLM2, 2, (2.0, 1.0))
    assert [(len(q), len(kv)) for q, kv in heads_of] == [(6, 2), (3, 1)]
    assert [len(part) for part in columns_of] == [1024, 512]
    assert [len(part) for part in vocabulary(SMOLLM2, 2, (2.0, 1.0))] == [32768, 16384]


def test_columns_make_up_for_heads_that_cannot_follow_the_shares() -> None:
    # One KV group each is all that can be split, so the strong rank takes more of the MLP than its 3 in 4.
    model = toy(num_heads=4, num_kv_heads=2, hidden_size=64, head_dim=64, intermediate_size=2048)
    assert [(len(q), len(kv)) for q, kv in heads(model, 2, (3.0, 1.0))] == [(2, 1), (2, 1)]
    wide, narrow = (len(part) for part in columns(model, 2, (3.0, 1.0)))
    attention, each = 6 * 64 * 64, 3 * 64
    assert wide / narrow > 3.4
    assert (attention + each * wide) / (attention + each * narrow) == pytest.approx(3, rel=0.1)


def test_more_ranks_than_kv_heads_by_shares() -> None:
    # 5 : 2 : 1 over 2 KV heads of 3 query heads: the strong rank has a head to itself, the others share one.
    model = toy(num_heads=6, num_kv_heads=2)
    assert heads(model, 3, (5.0, 2.0, 1.0)) == [
        (range(0, 3), range(0, 1)),
        (range(3, 5), range(1, 2)),
        (range(5, 6), range(1, 2)),
    ]


def test_no_rank_is_without_columns_however_much_attention_it_has() -> None:
    assert all(len(part) >= 1 for part in columns(toy(head_dim=64, intermediate_size=16), 2))


def test_qkv_is_cut_segment_by_segment() -> None:
    own = shard(toy(), Layout(tp=3), coords_of(Layout(tp=3), 1))
    [qkv] = [parameter for parameter in parameters(toy(), own) if parameter.name == "layers.0.attn.qkv.weight"]
    cuts = [(weight_slice.source.split(".")[-2], weight_slice.take, weight_slice.at) for weight_slice in qkv.slices]
    assert cuts == [("q_proj", range(12, 24), 0), ("k_proj", range(4, 8), 12), ("v_proj", range(4, 8), 16)]
    assert qkv.shape == (20, 6)
