"""Suggestions for a layout that is legal but needs more memory than there is: the nearest legal layouts that fit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from placement.layout.layout import Layout
from placement.legality import suggestions
from placement.legality.rules import broken
from placement.model.spec import ModelSpec
from placement.nodes.hardware import ClusterSpec

_MOST_TRIED = 200
"""Layouts that are tried at most: the memory of a large layout takes long to compute."""


def nearest_that_fit(
    asked: Layout, spec: ModelSpec, cluster: ClusterSpec | None, fits: Callable[[Layout], bool]
) -> list[Layout]:
    """Returns at most two legal layouts, with no more ranks than `asked`, that satisfy `fits`: the one with the fewest changes,
    and the one that uses the most of its devices. The result is empty if there is none among those tried."""
    fewer = [asked.model_copy(update={"replicas": count}) for count in range(asked.replicas, 0, -1)]
    found = (other for each in fewer for other in suggestions.candidates(each, spec, cluster) if other != asked)
    among = islice(found, _MOST_TRIED)
    known: dict[str, bool] = {}

    def does(other: Layout) -> bool:
        if str(other) not in known:
            known[str(other)] = not broken(other, spec, cluster) and fits(other)
        return known[str(other)]

    return suggestions.nearest(asked, "", list(among), does)
