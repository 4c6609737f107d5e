"""The text form of a layout, and the rules a layout must keep."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.layout.layout import Layout, LayoutError
from placement.legality.check import check, require
from placement.legality.suggestions import candidates
from placement.model.spec import ModelSpec
from placement.nodes.hardware import ClusterSpec, NodeSpec

quick = settings(deadline=None, max_examples=100)
sizes = st.integers(1, 40)


def toy(**changes: object) -> ModelSpec:
    values: dict[str, object] = {
        "family": "llama",
        "hidden_size": 64,
        "num_layers": 5,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 8,
        "intermediate_size": 96,
        "vocab_size": 101,
        "max_position": 64,
        "norm_eps": 1e-5,
    }
    values |= changes
    return ModelSpec(**{"windows": (None,) * int(str(values["num_layers"])), **values})


def cluster(*slots: int) -> ClusterSpec:
    return ClusterSpec(nodes=tuple(NodeSpec(name=f"node{index}", slots=count) for index, count in enumerate(slots)))


layouts = st.builds(
    Layout,
    replicas=sizes,
    pp=sizes,
    attn_dp=sizes,
    cp=sizes,
    tp=sizes,
    dcp=sizes,
    ep=sizes,
    moe_dp=sizes,
    sp=st.booleans(),
    redundant_experts=st.integers(0, 9),
    stage_layers=st.none() | st.lists(sizes, min_size=1, max_size=5).map(tuple),
    tp_shares=st.none() | st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=3).map(tuple),
    cp_style=st.sampled_from(["ring", "allgather"]),
)


# Text form


@quick
@given(layouts)
def test_a_layout_survives_its_text_form(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


@quick
@given(layouts, sizes)
def test_a_moe_tp_given_by_hand_survives_too(layout: Layout, moe_tp: int) -> None:
    explicit = Layout(**layout.asked | {"moe_tp": moe_tp})
    assert Layout.parse(str(explicit)) == explicit
    assert Layout.model_validate_json(explicit.model_dump_json()) == explicit
    assert (str(explicit) == str(layout)) == (moe_tp == layout.moe_tp)


@pytest.mark.parametrize(
    ("text", "moe_tp"),
    [
        ("", 1),
        ("tp=2", 2),
        ("tp=16,ep=16", 1),
        ("tp=16,ep=8", 2),
        ("attn_dp=4,tp=4,ep=16", 1),
        ("attn_dp=4,cp=2,tp=3,moe_dp=3", 8),
    ],
)
def test_moe_tp_is_what_is_left_of_a_stage(text: str, moe_tp: int) -> None:
    layout = Layout.parse(text)
    assert layout.moe_tp == moe_tp == layout.stage_ranks // (layout.moe_dp * layout.ep)
    assert "moe_tp" not in str(layout)
    assert Layout.parse(f"{text},moe_tp={moe_tp}") == layout


@pytest.mark.parametrize("text", ["", " ", "tp=1", " tp = 1 , "])
def test_these_texts_are_the_single_rank(text: str) -> None:
    assert Layout.parse(text) == Layout()
    assert str(Layout.parse(text)) == "tp=1"


def test_every_kind_of_field_is_read() -> None:
    text = "tp=2,pp=2,sp=true,stage_layers=16/14,tp_shares=2/1.5,cp_style=allgather"
    layout = Layout.parse(text)
    assert layout == Layout(tp=2, pp=2, sp=True, stage_layers=(16, 14), tp_shares=(2.0, 1.5), cp_style="allgather")
    assert str(layout) == text


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("tpp=2", ["'tpp'", "did you mean tp?", "replicas"]),
        ("stage-layers=1/2", ["did you mean stage_layers?"]),
        ("zzz=2", ["there is no field 'zzz'"]),
        ("tp=0", ["tp is 0", "from 1"]),
        ("tp=-1", ["tp is '-1'", "from 1"]),
        ("tp=two", ["tp is 'two'"]),
        ("tp=²", ["tp is '²'"]),
        ("tp=99999999999999", ["tp is '99999999999999'"]),
        ("tp", ["tp is ''"]),
        ("tp=2,tp=2", ["tp is given twice"]),
        ("stage_layers=3/0", ["stage_layers is 3/0"]),
        ("stage_layers=3//2", ["stage_layers is '3//2'"]),
        ("tp_shares=1/nan", ["tp_shares"]),
        ("tp=2,tp_shares=3/0", ["tp_shares is 3/0", "above 0, one per tp rank"]),
        ("tp=2,tp_shares=3/-1", ["tp_shares is 3/-1"]),
        ("sp=yes", ["sp is 'yes'", "true or false"]),
        ("cp_style=star", ["cp_style is 'star'", "ring or allgather"]),
        ("tp=x,qq=1,pp=1.5", ["tp is 'x'", "'qq'", "pp is '1.5'"]),
    ],
)
def test_a_bad_text_is_refused_with_its_field(text: str, parts: list[str]) -> None:
    with pytest.raises(LayoutError) as refused:
        Layout.parse(text)
    assert all(part in str(refused.value) for part in [repr(text), *parts])


@quick
@given(st.text(alphabet="tp=12,/.se_xtrue ", max_size=20))
def test_no_text_breaks_the_parser(text: str) -> None:
    with contextlib.suppress(LayoutError):
        layout = Layout.parse(text)
        assert Layout.parse(str(layout)) == layout


# Rules


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("tp=8", toy(num_heads=28, num_kv_heads=4)),
        ("tp=6", toy(num_heads=40, num_kv_heads=8)),
        ("tp=2", toy()),
        ("tp=5", toy()),
        ("tp=9,pp=5", toy()),
        ("tp=3", toy(num_heads=32, num_kv_heads=8)),
        ("cp=3,tp=2,cp_style=allgather", toy()),
        ("tp=6,dcp=2", toy()),
        ("tp=2,cp=2,pp=2", toy()),
        ("pp=3,stage_layers=1/3/1,replicas=4", toy()),
        ("tp=2,tp_shares=3/1", toy()),
        ("tp=9,tp_shares=1000/1/1/1/1/1/1/1/0.001", toy()),
        ("tp=3,pp=2,sp=true", toy()),
    ],
)
def test_uneven_layouts_are_legal(text: str, model: ModelSpec) -> None:
    assert check(Layout.parse(text), model) == []
    require(Layout.parse(text), model, cluster(64, 64, 64))


@pytest.mark.parametrize(
    ("text", "field", "numbers"),
    [
        ("tp=10", "tp", ["10", "9 query heads"]),
        ("pp=6", "pp", ["6", "5 layers"]),
        ("pp=2,stage_layers=2/2", "stage_layers", ["2/2", "4 layers", "has 5"]),
        ("pp=3,stage_layers=3/2", "stage_layers", ["2 stages", "pp=3"]),
        ("tp=3,tp_shares=2/1", "tp_shares", ["2/1", "2 tp ranks", "tp=3"]),
        ("tp_shares=5/2/1", "tp_shares", ["5/2/1", "3 tp ranks", "tp=1"]),
        ("tp=10,tp_shares=1/1/1/1/1/1/1/1/1/1", "tp", ["10", "9 query heads"]),
        ("replicas=5,tp=2", "replicas", ["10 devices", "8 slots"]),
        ("tp=5", "tp", ["tp=5", "node0", "4 slots"]),
        ("pp=3,tp=3", "pp", ["9 devices", "8 slots"]),
        ("ep=2", "ep", ["ep=2", "the model has none"]),
        ("cp=9", "cp", ["cp=9", "9 devices", "8 slots"]),
        ("tp=4,dcp=2", "dcp", ["dcp=2", "tp=4", "the 3 KV heads", "2, 1, 1 ranks"]),
        ("sp=true", "sp", ["sp=true", "tp=1"]),
    ],
)
def test_an_illegal_layout_is_refused_with_field_and_numbers(text: str, field: str, numbers: list[str]) -> None:
    violations = check(Layout.parse(text), toy(), cluster(4, 4))
    found = [violation for violation in violations if violation.field == field]
    assert found
    assert all(any(number in violation.message for violation in found) for number in numbers)


def test_slots_left_over_on_several_nodes_do_not_make_a_tp_group() -> None:
    [violation] = check(Layout(tp=2, pp=3), toy(), cluster(3, 3))
    assert "3 tp groups of 2 ranks, but only 2 fit" in violation.message


@pytest.mark.parametrize(
    ("changes", "numbers"), [({"intermediate_size": 4}, ["tp=5", "4 MLP"]), ({"vocab_size": 3}, ["tp=5", "3 voc"])]
)
def test_every_rank_needs_a_column_and_a_vocabulary_row(changes: dict[str, int], numbers: list[str]) -> None:
    [violation] = check(Layout(tp=5), toy(**changes))
    assert all(number in violation.message for number in numbers)


def test_too_large_a_tp_names_the_sizes_that_work_and_a_pipeline() -> None:
    violations = check(Layout(tp=16), toy(), cluster(8, 8))
    assert [violation.field for violation in violations] == ["tp", "tp"]
    message = violations[0].message
    assert "16" in message
    assert "9 query heads" in message
    assert "tp sizes that work: 1-8" in message
    assert violations[0].suggestions == ("tp=8", "tp=8,pp=2")
    assert all(text in message for text in violations[0].suggestions)


def test_all_broken_rules_are_in_one_error() -> None:
    with pytest.raises(LayoutError) as refused:
        require(Layout.parse("tp=10,pp=6,ep=2,stage_layers=1/1"), toy(), cluster(2))
    text = str(refused.value)
    assert "tp=10,pp=6,ep=2,stage_layers=1/1" in text
    assert text.count("\n- ") == 7
    parts = [
        "query heads",
        "5 layers",
        "the model has none",
        "names 2 stages",
        "adds up to 2",
        "60 devices",
        "one node",
    ]
    assert all(part in text for part in parts)


def test_sequence_parallelism_is_kept_where_it_can_be() -> None:
    [violation] = check(Layout.parse("tp=10,sp=true"), toy())
    assert violation.suggestions == ("tp=9,sp=true", "tp=5,pp=2,sp=true")


def test_a_split_by_hand_is_mended_to_the_nearest_one() -> None:
    [violation] = check(Layout.parse("pp=3,stage_layers=10/12/9"), toy(num_layers=30))
    assert violation.suggestions[0] == "pp=3,stage_layers=10/11/9"


def test_a_split_without_its_pp_suggests_the_pp_it_names() -> None:
    suggestions = {text for violation in check(Layout.parse("stage_layers=2/3"), toy()) for text in violation.suggestions}
    assert "pp=2,stage_layers=2/3" in suggestions


def test_shares_without_their_tp_suggest_the_tp_they_name() -> None:
    [violation] = check(Layout.parse("pp=2,tp_shares=5/2/1,stage_layers=2/3"), toy())
    assert "tp=3,pp=2,stage_layers=2/3,tp_shares=5/2/1" in violation.suggestions


def test_no_suggestion_where_nothing_fits() -> None:
    violations = check(Layout(), toy(), cluster())
    assert violations
    assert all(violation.suggestions == () and "No layout" in violation.message for violation in violations)


@settings(quick, max_examples=40)
@given(
    layouts,
    st.none() | st.lists(st.integers(0, 9), max_size=4).map(lambda slots: cluster(*slots)),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(1, 40),
)
def test_every_suggestion_passes(
    layout: Layout, nodes: ClusterSpec | None, kv_heads: int, per_kv: int, layers: int, columns: int
) -> None:
    model = toy(num_heads=kv_heads * per_kv, num_kv_heads=kv_heads, num_layers=layers, intermediate_size=columns, vocab_size=20)
    for violation in check(layout, model, nodes):
        assert violation.suggestions or (nodes is not None and nodes.slots == 0)
        for text in violation.suggestions:
            assert text in violation.message
            assert check(Layout.parse(text), model, nodes) == []


@settings(quick, max_examples=40)
@given(layouts, st.lists(st.integers(0, 9), max_size=4), st.integers(1, 12), st.integers(1, 12))
def test_the_tp_sizes_said_to_work_do(layout: Layout, slots: list[int], layers: int, columns: int) -> None:
    model, nodes = toy(num_layers=layers, intermediate_size=columns), cluster(*slots)
    assert [other for other in candidates(layout, model, nodes) if check(other, model, nodes)] == []
    assert [other for other in candidates(layout, model, None) if check(other, model)] == []


_CHILD = """
import sys
from placement.nodes.hardware import ClusterSpec, NodeSpec
from placement.layout.layout import Layout
from placement.legality.check import require
from placement.model.spec import ModelSpec

model = ModelSpec(family="llama", hidden_size=64, num_layers=5, num_heads=24, num_kv_heads=8, head_dim=8, intermediate_size=96,
                  vocab_size=101, max_position=64, norm_eps=1e-5, windows=(None,) * 5)
nodes = ClusterSpec(nodes=(NodeSpec(name="a", slots=8),))
for text in sys.argv[1:]:
    try:
        require(Layout.parse(text), model, nodes)
    except Exception as error:
        print(type(error).__name__, error)
    else:
        print("accepted", text)
print(sorted(name for name in ("torch", "ray") if name in sys.modules))
"""

_ILLEGAL = (
    *(
        "tp=4,dcp=2",
        "tp=8,dcp=4",
        "tp=25",
        "tp=9",
        "pp=6",
        "pp=9",
        "ep=3",
        "ep=2,moe_tp=2",
        "moe_dp=2",
        "cp=9",
        "attn_dp=2,tp=9",
    ),
    *("replicas=9", "tp=4,pp=3", "tp=0", "tq=2", "sp=true", "redundant_experts=1", "stage_layers=5/5", "pp=2,stage_layers=2/2"),
    *("tp=3,tp_shares=2/1", "cp_style=allgather"),
)


def test_the_verdict_is_the_same_without_asserts() -> None:
    def verdicts(*flags: str) -> str:
        command = [sys.executable, *flags, "-c", _CHILD, *_ILLEGAL]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    plain = verdicts()
    assert plain == verdicts("-O")
    assert plain.count("LayoutError") == len(_ILLEGAL)
    assert plain.splitlines()[-1] == "[]"
    assert "accepted" not in plain
    assert "AssertionError" not in plain
