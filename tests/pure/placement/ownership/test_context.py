"""Zig-zag chunks, block ownership, the choice of what is exchanged, and which dcp sizes are legal."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.layout import mesh
from placement.layout.layout import Layout
from placement.layout.mesh import Coords
from placement.legality.check import check
from placement.legality.dcp_sizes import legal_dcp
from placement.model.spec import ModelSpec
from placement.ownership import shards
from placement.ownership.context import (
    ContextRank,
    Overlap,
    Ownership,
    chunks,
    is_split,
    passes_kv,
    restored_order,
    spans,
    zigzag,
)

quick = settings(deadline=None, max_examples=200)
cps = st.integers(1, 6)


def model(q_heads: int, kv_heads: int) -> ModelSpec:
    return ModelSpec(
        family="llama",
        hidden_size=64,
        num_layers=4,
        num_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=8,
        intermediate_size=96,
        vocab_size=101,
        max_position=64,
        norm_eps=1e-5,
        windows=(None,) * 4,
    )


# Zig-zag


@quick
@given(st.integers(0, 200), cps)
def test_chunks_cover_the_tokens_in_order_and_differ_by_at_most_one(tokens: int, cp: int) -> None:
    all_chunks = chunks(tokens, cp)
    assert [token for chunk in all_chunks for token in chunk] == list(range(tokens))
    sizes = [len(chunk) for chunk in all_chunks]
    assert len(all_chunks) == 2 * cp
    assert max(sizes) - min(sizes) <= 1


@quick
@given(st.integers(0, 200), cps)
def test_every_rank_is_within_one_token_of_its_share(tokens: int, cp: int) -> None:
    shares = [len(first) + len(second) for first, second in zigzag(tokens, cp)]
    assert sum(shares) == tokens
    assert all(abs(share - tokens / cp) <= 1 for share in shares)


@quick
@given(st.integers(1, 30), cps)
def test_causal_work_is_equal_where_the_tokens_divide(each: int, cp: int) -> None:
    work = [sum(token + 1 for chunk in pair for token in chunk) for pair in zigzag(2 * cp * each, cp)]
    assert len(set(work)) == 1


@quick
@given(st.integers(0, 100), cps)
def test_split_and_restore_is_the_identity(tokens: int, cp: int) -> None:
    joined = [token for pair in zigzag(tokens, cp) for chunk in pair for token in chunk]
    if is_split(tokens, cp):
        assert [joined[at] for at in restored_order([tokens], cp)] == list(range(tokens))


@quick
@given(st.lists(st.integers(1, 20), max_size=5), cps)
def test_the_tokens_of_several_rows_are_restored(rows: list[int], cp: int) -> None:
    joined = [
        (row, token)
        for rank in range(cp)
        for row, count in enumerate(rows)
        for span in spans(0, count, cp, rank)
        for token in span
    ]
    expected = [(row, token) for row, count in enumerate(rows) for token in range(count)]
    assert [joined[at] for at in restored_order(rows, cp)] == expected


@quick
@given(st.integers(0, 50), st.integers(1, 60), cps)
def test_a_row_is_split_from_two_tokens_a_chunk_pair_on(start: int, count: int, cp: int) -> None:
    runs = [[position for span in spans(start, count, cp, rank) for position in span] for rank in range(cp)]
    if is_split(count, cp):
        assert sorted(position for run in runs for position in run) == list(range(start, start + count))
        assert runs[0][-1] == start + count - 1, "the last token is on cp rank 0"
        assert all(runs), "no rank is idle"
    else:
        assert cp == 1 or count < 2 * cp
        assert runs == [list(range(start, start + count))] * cp


# Ownership


@quick
@given(st.integers(0, 200), st.integers(1, 6), st.sampled_from([1, 4, 16]))
def test_every_position_has_one_owner_and_owners_are_dense(tokens: int, owners: int, block: int) -> None:
    shares = [Ownership(owners, owner, block) for owner in range(owners)]
    assert sorted(position for share in shares for position in share.positions(tokens).tolist()) == list(range(tokens))
    lengths = [share.length(tokens) for share in shares]
    assert sum(lengths) == tokens
    assert max(lengths) - min(lengths) <= block
    for share in shares:
        blocks = list(range(100, 100 + -(-tokens // block)))
        slots = [share.slot(position, blocks) for position in share.positions(tokens).tolist()]
        assert slots == [100 * block + at for at in range(share.length(tokens))], "local slots are dense"
        others = set(range(tokens)) - set(share.positions(tokens).tolist())
        assert all(share.slot(position, blocks) == -1 for position in others)


def test_the_drawing_of_the_module_holds() -> None:
    one = Ownership(2, 1, 16)
    assert one.length(70) == 32
    assert one.positions(70).tolist() == [*range(16, 32), *range(48, 64)]
    assert Ownership(2, 0, 16).slot(64, [7, 3, 9]) == 9 * 16
    assert [Ownership(2, owner, 16).blocks([7, 5, 3, 4, 9]) for owner in (0, 1)] == [[7, 3, 9], [5, 4]]


@pytest.mark.parametrize("text", ["cp=2", "cp=3,tp=2", "tp=4,dcp=2", "cp=2,tp=4,dcp=2,pp=2"])
def test_owners_are_numbered_by_cp_rank_then_dcp_rank(text: str) -> None:
    layout = Layout.parse(text)
    for stage in range(layout.pp):
        places = [ContextRank.of(layout, Coords(stage, 0, cp, tp), 16) for cp in range(layout.cp) for tp in range(layout.tp)]
        owners = [place.ownership().owner for place in places]
        assert sorted(owners) == sorted(list(range(layout.kv_owners)) * (layout.tp // layout.dcp))
        assert [place.ownership(place.cp_rank) for place in places] == [place.ownership() for place in places]
    assert places[layout.tp - 1].ownership(layout.cp - 1).owner == layout.kv_owners - 1


# What is exchanged


def test_without_overlap_queries_are_passed_to_a_long_cached_context() -> None:
    """64 query heads, 8 KV heads: the limit is a share of 1/8 new tokens."""
    assert passes_kv(100, 700, 64, 8, 2)
    assert not passes_kv(100, 701, 64, 8, 2)
    assert passes_kv(1, 0, 64, 8, 2)


def test_with_overlap_enough_arithmetic_hides_the_keys() -> None:
    fast = Overlap(flops=1e15, bytes_per_s=1e11)
    hidden_from = 4 * 1e15 * 8 * 2 / (2 * 64 * 1e11)
    assert passes_kv(int(hidden_from) + 1, 10**9, 64, 8, 4, fast)
    assert not passes_kv(int(hidden_from) - 1, 10**9, 64, 8, 4, fast)
    assert passes_kv(100, 300, 64, 8, 4, fast), "at 2 * kv_heads / q_heads the two weigh the same"
    assert not passes_kv(100, 301, 64, 8, 4, fast)


# dcp


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "tp", "legal"),
    [
        (9, 3, 6, [1, 2]),
        (9, 3, 9, [1, 3]),
        (9, 3, 3, [1]),
        (9, 3, 5, [1]),
        (4, 1, 4, [1, 2, 4]),
        (24, 8, 4, [1]),
        (24, 4, 8, [1, 2]),
        (12, 2, 6, [1, 3]),  # dcp=2 divides tp, but its group {2, 3} would span both heads
        (12, 2, 5, [1]),  # 3 and 2 holders
        (64, 8, 16, [1, 2]),
    ],
)
def test_the_legal_dcp_sizes(q_heads: int, kv_heads: int, tp: int, legal: list[int]) -> None:
    assert legal_dcp(model(q_heads, kv_heads), tp) == legal


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2, 4, 5, 6, 8])
@pytest.mark.parametrize("dcp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("cp", [1, 2])
def test_what_the_front_door_accepts_the_ranks_can_build(kv_heads: int, tp: int, dcp: int, cp: int) -> None:
    spec, layout = model(24, kv_heads), Layout(tp=tp, cp=cp, dcp=dcp)
    groups = mesh.groups(layout, "dcp")
    held = [{shards.shard(spec, layout, mesh.coords_of(layout, rank)).kv_heads for rank in group} for group in groups]
    builds = all(len(group) == dcp for group in groups) and (dcp == 1 or all(len(k) == 1 == len(*k) for k in held))
    violations = [violation for violation in check(layout, spec) if violation.field == "dcp"]
    assert (violations == []) == builds
    for violation in violations:
        assert str(dcp) in violation.message
        assert f"the {kv_heads} KV heads" in violation.message
        assert violation.suggestions
        assert all(check(Layout.parse(text), spec) == [] for text in violation.suggestions)


def test_a_refused_dcp_names_the_sizes_that_work() -> None:
    [violation] = check(Layout(tp=8, dcp=4), model(24, 4))
    assert "dcp=4" in violation.message
    assert "2, 2, 2, 2 ranks" in violation.message
    assert "with tp=8 dcp can be 1-2" in violation.message
    assert "tp=8,dcp=2" in violation.suggestions
    [violation] = check(Layout(tp=4, dcp=2), model(24, 8))
    assert "tp=4 is no more than the 8 KV heads" in violation.message


def test_a_cp_style_without_cp_is_refused() -> None:
    [violation] = check(Layout(cp_style="allgather"), model(24, 4))
    assert (violation.field, violation.suggestions) == ("cp_style", ("tp=1",))
