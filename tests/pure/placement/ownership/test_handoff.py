"""The hand-off map: every needed byte once, from a rank that has it, evenly; in pages of any two sizes; and its totals."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from math import lcm

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from placement.explain.handoff_text import explain_handoff, handoff_text
from placement.layout.layout import Layout
from placement.legality.check import check
from placement.model.spec import ModelSpec
from placement.ownership.context import Ownership
from placement.ownership.handoff import Copy, Side, handoff, holdings, sequence_bytes
from placement.ownership.handoff_pages import PageRange, PageTable, page_ranges
from placement.ownership.handoff_positions import PeriodicPositions, shared
from tests.support.kv.handoff_cases import heads_model, kept, latent_model, moved
from tests.support.layout_draws import draw_layout

quick = settings(deadline=None, max_examples=150)
LENGTHS = (1, 15, 16, 17, 33, 200)
models = st.one_of(
    st.builds(heads_model, st.integers(1, 5), st.integers(1, 3), st.integers(1, 6)),
    st.builds(latent_model, st.integers(1, 6), st.integers(1, 5)),
)


@st.composite
def sides(draw: st.DrawFn, spec: ModelSpec) -> Side:
    """Any legal side: sizes that are no powers of two, uneven stages and shares, DP ranks, pages."""
    drawn = random.Random(draw(st.integers(0, 2**32 - 1)))
    layout = Layout() if draw(st.integers(0, 7)) == 0 else draw_layout(drawn, spec, most_ranks=10)
    return Side(layout, draw(st.sampled_from((1, 4, 5, 16, 32))), draw(st.integers(0, layout.attn_dp - 1)))


# What is copied


@quick
@given(st.data(), models, st.one_of(st.sampled_from(LENGTHS), st.integers(1, 80)))
def test_each_needed_byte_arrives_once_from_a_rank_that_has_it(data: st.DataObject, spec: ModelSpec, tokens: int) -> None:
    if spec.num_heads == 1 and spec.num_layers == 1:
        source = destination = Side(Layout())
    else:
        source, destination = data.draw(sides(spec)), data.draw(sides(spec))
    copies = handoff(spec, source, destination, range(tokens))
    assert moved(copies, "destination") == Counter(kept(spec, destination, tokens))
    assert set(moved(copies, "source")) <= kept(spec, source, tokens)
    delivered = sum(copy.num_bytes(spec, "float32") for copy in copies)
    assert delivered == len(kept(spec, destination, tokens)) * spec.kv_planes * spec.kv_dim * 4


@quick
@given(st.data(), models, st.integers(1, 80))
def test_ranks_that_keep_the_same_are_even_within_a_layer(data: st.DataObject, spec: ModelSpec, tokens: int) -> None:
    if spec.num_heads == 1 and spec.num_layers == 1:
        return
    source, destination = data.draw(sides(spec)), data.draw(sides(spec))
    copies = handoff(spec, source, destination, range(tokens))
    sent = Counter(dict.fromkeys(range(source.layout.world), 0))
    for copy in copies:
        sent[copy.source] += len(copy.layers) * len(copy.kv_heads) * len(copy.positions)
    heaviest = max(len(copy.kv_heads) * len(copy.positions) for copy in copies)
    alike: dict[object, list[int]] = {}
    for held in holdings(spec, source):
        alike.setdefault((held.layers, held.kv_heads, held.ownership), []).append(held.world_rank)
    for ranks in alike.values():
        assert max(sent[rank] for rank in ranks) <= sum(sent[rank] for rank in ranks) / len(ranks) + heaviest


@pytest.mark.parametrize(
    "text", ["tp=4", "tp=3,pp=2", "cp=2,tp=2", "tp=4,dcp=2,cp=2", "attn_dp=2,tp=2", "tp=3,tp_shares=2/1/1"]
)
def test_between_equal_layouts_every_rank_copies_to_its_own_number(text: str) -> None:
    spec, side = heads_model(2, 4), Side(Layout.parse(text))
    assert check(side.layout, spec) == []
    assert all(copy.source == copy.destination for copy in handoff(spec, side, side, range(100)))


def test_the_drawings_of_the_module_hold() -> None:
    spec = heads_model(3)
    copies = handoff(spec, Side(Layout(tp=2)), Side(Layout(pp=2, stage_layers=(2, 2))), range(100))
    assert [(copy.source, copy.destination, copy.layers, copy.kv_heads) for copy in copies] == [
        (0, 0, range(2), range(2)),
        (1, 0, range(2), range(2, 3)),
        (0, 1, range(2, 4), range(2)),
        (1, 1, range(2, 4), range(2, 3)),
    ]
    one_head = heads_model(1, 4, 8)
    copies = handoff(one_head, Side(Layout(tp=4)), Side(Layout(pp=2, stage_layers=(4, 4))), range(100))
    assert [(copy.source, copy.layers, copy.destination) for copy in copies] == [
        (0, range(2), 0),
        (2, range(2, 4), 0),
        (1, range(4, 6), 1),
        (3, range(6, 8), 1),
    ]


def test_a_chunk_and_a_layer_range_are_cut_from_the_whole_map() -> None:
    spec, source, destination = heads_model(2, 3), Side(Layout(cp=2, tp=3), 16), Side(Layout(pp=3, cp=2), 32)
    whole = handoff(spec, source, destination, range(200))
    parts = [
        part
        for start in range(0, 200, 30)
        for layers in (range(0, 1), range(1, 4))
        for copy in whole
        if (part := copy.within(layers, range(start, min(start + 30, 200))))
    ]
    assert moved(parts, "destination") == moved(whole, "destination")
    assert moved(parts, "source") == moved(whole, "source")
    assert whole[0].within(range(90, 99), range(200)) is None


def test_a_part_that_the_decode_side_has_is_not_sent() -> None:
    spec = heads_model(2)
    source, destination = Side(Layout(tp=2)), Side(Layout(cp=2))
    copies = handoff(spec, source, destination, range(48, 70))
    assert {unit[3] for unit in moved(copies, "destination")} == set(range(48, 70))


def test_a_dp_rank_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="DP rank 2 is not one of the 2 DP ranks"):
        Side(Layout(attn_dp=2), dp_rank=2)


# Totals

V3 = latent_model(heads=128, layers=61, rank=512, rope=64)


@pytest.mark.parametrize("prefill", ["tp=1", "tp=8", "tp=16,pp=3", "tp=8,dcp=8", "cp=4,tp=2"])
@pytest.mark.parametrize(("decode", "each"), [("tp=1", 1), ("pp=4", 1), ("tp=8,dcp=8", 1), ("tp=8", 8), ("attn_dp=4", 1)])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_latents_are_576_values_a_token_and_layer_for_each_that_keeps_them(
    prefill: str, decode: str, each: int, tokens: int
) -> None:
    copies = handoff(V3, Side(Layout.parse(prefill)), Side(Layout.parse(decode), 32), range(tokens))
    assert sum(copy.num_bytes(V3, "bfloat16") for copy in copies) == each * tokens * 61 * 576 * 2
    assert sequence_bytes(V3, tokens, "bfloat16") == tokens * 61 * 576 * 2


@pytest.mark.parametrize("prefill", ["tp=2", "tp=3,pp=2", "tp=9", "cp=3"])
@pytest.mark.parametrize(("decode", "each"), [("tp=3", 1), ("pp=4", 1), ("tp=6", 2), ("tp=6,dcp=2", 1)])
def test_bytes_of_smollm2(prefill: str, decode: str, each: int) -> None:
    spec = heads_model(3, 3, 30, 64)
    copies = handoff(spec, Side(Layout.parse(prefill)), Side(Layout.parse(decode)), range(4096))
    assert sum(copy.num_bytes(spec, "bfloat16") for copy in copies) == each * 4096 * 30 * 2 * 3 * 64 * 2


# Positions


@quick
@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.sampled_from((1, 3, 16)), st.sampled_from((1, 4, 16, 32)))
def test_shared_positions_are_those_both_keep(data: st.DataObject, ours: int, theirs: int, page: int, other: int) -> None:
    one = Ownership(ours, data.draw(st.integers(0, ours - 1)), page)
    two = Ownership(theirs, data.draw(st.integers(0, theirs - 1)), other)
    window = range(*sorted((data.draw(st.integers(0, 150)), data.draw(st.integers(0, 150)))))
    found = shared(one, two, window)
    expected = sorted(set(one.positions(150).tolist()) & set(two.positions(150).tolist()) & set(window))
    assert [position for span in found.spans() for position in span] == expected
    assert len(found) == len(expected)
    spans = list(found.spans())
    assert all(before.stop < after.start for before, after in itertools.pairwise(spans)), "maximal runs"
    assert found.period == lcm(ours * page, theirs * other)


def test_positions_as_text() -> None:
    assert str(shared(Ownership(2, 0, 16), Ownership(3, 1, 32), range(300))) == "32-47 of every 96"
    assert str(shared(Ownership(1, 0, 16), Ownership(1, 0, 32), range(300))) == "all"
    assert list(PeriodicPositions(range(5, 90), 32, (range(32),)).spans()) == [range(5, 90)]


# Pages


def _tables(draw: random.Random, side: Side, copy_rank: int, spec: ModelSpec, tokens: int) -> PageTable:
    """A rank's pages of a sequence in any order; the pages of one owner differ, those of two owners may be the same number."""
    ownership = next(held.ownership for held in holdings(spec, side) if held.world_rank == copy_rank)
    blocks = -(-tokens // side.page_tokens)
    pages = [0] * blocks
    for owner in range(ownership.owners):
        own = range(owner, blocks, ownership.owners)
        for block, page in zip(own, draw.sample(range(blocks + 3), len(own)), strict=True):
            pages[block] = page
    return PageTable(ownership, pages)


@quick
@given(st.data(), st.integers(0, 2**32 - 1), st.one_of(st.sampled_from(LENGTHS), st.integers(1, 80)))
@example(None, 0, 200)
def test_page_ranges_put_every_position_into_its_slot(data: st.DataObject | None, seed: int, tokens: int) -> None:
    """One head in one plane, its pages as arrays: moved range by range, every position of the destination is right."""
    spec, drawn, token_bytes = heads_model(2, 3), random.Random(seed), 4
    if data is None:
        source, destination = Side(Layout(cp=3), 16), Side(Layout(cp=2), 32)
    else:
        source, destination = data.draw(sides(spec)), data.draw(sides(spec))
    tables: dict[tuple[str, int], PageTable] = {}
    arrived: dict[int, np.ndarray] = {}
    for copy in handoff(spec, source, destination, range(tokens)):
        if copy.layers.start > 0 or copy.kv_heads.start > 0:
            continue
        here = tables.setdefault(("from", copy.source), _tables(drawn, source, copy.source, spec, tokens))
        there = tables.setdefault(("to", copy.destination), _tables(drawn, destination, copy.destination, spec, tokens))
        memory = _filled(here, tokens)
        target = arrived.setdefault(copy.destination, np.full((len(there.pages) + 3) * destination.page_tokens, -1))
        for read, write in page_ranges(copy, here, there, token_bytes):
            assert read.length == write.length > 0
            for side, each in ((source, read), (destination, write)):
                assert each.offset >= 0
                assert each.offset + each.length <= side.page_tokens * token_bytes
            slots = [
                slice(at // token_bytes, (at + read.length) // token_bytes)
                for at in (
                    (read.page * source.page_tokens * token_bytes) + read.offset,
                    (write.page * destination.page_tokens * token_bytes) + write.offset,
                )
            ]
            assert (target[slots[1]] == -1).all(), "written twice"
            target[slots[1]] = memory[slots[0]]
    assert arrived
    for rank, target in arrived.items():
        assert np.array_equal(target, _filled(tables["to", rank], tokens))


def _filled(table: PageTable, tokens: int) -> np.ndarray:
    """The slots of a rank with the position that each holds, -1 where none."""
    memory = np.full((len(table.pages) + 3) * table.ownership.block_size, -1)
    own = table.ownership.blocks(list(table.pages))
    for position in range(tokens):
        slot = table.ownership.slot(position, own)
        if slot >= 0:
            memory[slot] = position
    return memory


def test_the_drawing_of_pages_holds() -> None:
    copy = Copy(0, 0, range(1), range(1), shared(Ownership(1, 0, 16), Ownership(1, 0, 32), range(40)))
    here, there = PageTable(Ownership(1, 0, 16), [7, 3, 9]), PageTable(Ownership(1, 0, 32), [4, 6])
    assert list(page_ranges(copy, here, there, 8)) == [
        (PageRange(7, 0, 128), PageRange(4, 0, 128)),
        (PageRange(3, 0, 128), PageRange(4, 128, 128)),
        (PageRange(9, 0, 64), PageRange(6, 0, 64)),
    ]


def test_blocks_that_were_not_reserved_are_named() -> None:
    copy = Copy(0, 0, range(1), range(1), shared(Ownership(1, 0, 16), Ownership(1, 0, 16), range(40)))
    here, there = PageTable(Ownership(1, 0, 16), [0, 1, 2]), PageTable(Ownership(1, 0, 16), [0, 1])
    with pytest.raises(ValueError, match="position 32 is in block 2 of 16 tokens, but the sequence has 2 blocks"):
        list(page_ranges(copy, here, there, 8))


# Text


def test_the_report_says_who_sends_what() -> None:
    text = handoff_text(explain_handoff(heads_model(3), Layout(tp=2), Layout(pp=2), 64, "float32"), "tiny")
    assert "tiny: prefill tp=2 hands KV to decode pp=2" in text
    assert "768 B a prompt token: 4 layers x 2 x 3 KV heads x 8 x 4 B (float32)" in text
    assert "4 copies" in text
    assert "prefill rank 0 sends most: 32 KiB, 1.33x the mean" in text


def test_the_report_says_what_moves_more_than_once() -> None:
    found = explain_handoff(latent_model(), Layout(tp=2), Layout(tp=3), 64, "float32")
    assert found.moved_bytes == 3 * found.prompt_bytes
    assert "(3.00x): decode ranks that keep the same each get their own" in handoff_text(found, "tiny")
    dp_size = explain_handoff(heads_model(2), Layout(attn_dp=2), Layout(cp=2), 64, "float32")
    assert "from DP rank 0 to DP rank 0 (of DP ranks: prefill 2)" in handoff_text(dp_size, "tiny")
