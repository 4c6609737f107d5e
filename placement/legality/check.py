"""The layout validator: reports every broken rule at once, each with the nearest legal layouts."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from placement.layout.layout import Layout, LayoutError
from placement.legality import suggestions
from placement.legality.rules import broken
from placement.model.spec import ModelSpec
from placement.nodes.hardware import ClusterSpec


class Violation(BaseModel):
    """One broken rule. `suggestions` are the nearest legal layouts in text form; each of them passes `check`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    field: str
    message: str
    suggestions: tuple[str, ...] = ()


def check(layout: Layout, spec: ModelSpec, cluster: ClusterSpec | None = None) -> list[Violation]:
    """Returns every rule that a layout breaks for a model, each with the nearest legal layouts; an empty list if the layout is
    legal.

    The rules of the cluster (enough slots, tp groups inside nodes) are checked only if one is given.
    """
    found = broken(layout, spec, cluster)
    if not found:
        return []
    among = suggestions.candidates(layout, spec, cluster)

    def violation(field: str, sentence: str) -> Violation:
        legal = suggestions.nearest(layout, field, among, lambda other: not broken(other, spec, cluster))
        sizes = f" tp sizes that work: {suggestions.sizes(other.tp for other in among)}." if field == "tp" and legal else ""
        tries = f" Try {' or '.join(map(str, legal))}." if legal else " No layout of this model fits here."
        return Violation(field=field, message=f"{sentence}.{sizes}{tries}", suggestions=tuple(map(str, legal)))

    return [violation(field, sentence) for field, sentence in found]


def require(layout: Layout, spec: ModelSpec, cluster: ClusterSpec | None = None) -> None:
    """Raises `LayoutError` with every broken rule, and the nearest legal layouts, in one message, unless the layout is legal
    for the model and, if given, the cluster."""
    violations = check(layout, spec, cluster)
    if violations:
        raise LayoutError("\n".join([f"layout {layout} cannot be used:", *(f"- {broken.message}" for broken in violations)]))
