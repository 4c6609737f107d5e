"""Stop strings found in a text that comes in pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.text.stop_strings import StopStrings

LETTERS = "aab"


def run(pieces, stops, include=False):
    """The released texts, and the stop string that ended them."""
    search, released = StopStrings(stops, include), []
    for piece in pieces:
        text, stop = search.push(piece)
        released.append(text)
        if stop is not None:
            return released, stop
    return [*released, search.finish()], None


def test_only_a_possible_beginning_is_held_back():
    assert run(["AB", "CD", "EF"], ["BCDE"]) == (["A", "", ""], "BCDE")
    assert run(["AB", "CD", "XY"], ["BCDE"]) == (["A", "", "BCDXY", ""], None)
    assert run(["aa", "a", "b"], ["aab"]) == (["", "a", ""], "aab")
    assert run(["no", " stops"], []) == (["no", " stops", ""], None)


@pytest.mark.parametrize("stops", [["CD", "BC"], ["BC", "CD"]])
def test_the_first_to_be_complete_wins(stops):
    assert run(["ABCD"], stops) == (["A"], "BC")


def test_of_two_complete_at_once_the_longest_wins():
    assert run(["xABC"], ["C", "ABC"]) == (["x"], "ABC")
    assert run(["xABC"], ["C", "ABC"], include=True) == (["xABC"], "ABC")


@given(
    text=st.text(LETTERS, max_size=30),
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    include=st.booleans(),
)
def test_cuts_do_not_matter(text, stops, cuts, include):
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    released, stop = run(pieces, stops, include)
    whole, same = run([text], stops, include)
    assert ("".join(released), stop) == ("".join(whole), same)
    ends = [(text.index(found) + len(found), -len(found)) for found in stops if found in text]
    if not ends:
        assert "".join(released) == text
    else:
        end, length = min(ends)
        assert "".join(released) == text[: end if include else end + length]


@given(text=st.text(LETTERS, max_size=30), stop=st.text(LETTERS, min_size=1, max_size=6))
def test_no_more_is_held_than_could_become_the_stop_string(text, stop):
    search, shown = StopStrings([stop]), ""
    for at, character in enumerate(text, 1):
        released, found = search.push(character)
        shown += released
        if found:
            return
        held = text[len(shown) : at]
        assert stop.startswith(held)
        assert not any(stop.startswith(text[start:at]) for start in range(len(shown)))
