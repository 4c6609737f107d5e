"""Which steps run their norms and residual sums scattered over the tp group (``sp=true``).

Scattering replaces each all-reduce by a reduce-scatter and an all-gather: the same bytes in twice the calls. It pays where
the region's own work does, so where prompts are run: a step is scattered when its prompt tokens (those of rows that run more
than one) are at least `TOKENS_PER_RANK` for each tp rank. Steps that only decode never are. The rule reads the plan and
nothing else, so all ranks agree.
"""

from __future__ import annotations

from collections.abc import Iterable

from placement.layout.layout import Layout

TOKENS_PER_RANK = 32


def scatter_from(layout: Layout) -> int | None:
    """Prompt tokens of a step from which on it is scattered; None: never."""
    return TOKENS_PER_RANK * layout.tp if layout.sp else None


def is_scattered(query_lens: Iterable[int], least: int | None) -> bool:
    """Whether a step whose rows run `query_lens` tokens each is scattered; `least` is that of `scatter_from`."""
    return least is not None and sum(count for count in query_lens if count > 1) >= least
