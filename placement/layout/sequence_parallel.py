"""Sequence parallelism (``sp=true``): which steps scatter the tokens of norms and residual sums over the tp group.

Scattering replaces each all-reduce by a reduce-scatter and an all-gather: the same bytes in twice the calls. It pays off in
prefill, where norms and residual sums take time. A step is scattered if its prompt tokens (tokens of rows that run more than
one) number at least `TOKENS_PER_RANK` per tp rank. Decode-only steps are never scattered. The rule depends on the step plan
alone, so all ranks agree.
"""

from __future__ import annotations

from collections.abc import Iterable

from placement.layout.layout import Layout

TOKENS_PER_RANK = 32
"""Minimum number of prompt tokens per tp rank in a scattered step."""


def scatter_from(layout: Layout) -> int | None:
    """Returns the minimum number of prompt tokens for which a step is scattered over the tp group (sequence parallelism); None:
    no step is scattered, since the layout has no `sp`."""
    return TOKENS_PER_RANK * layout.tp if layout.sp else None


def is_scattered(query_lens: Iterable[int], least: int | None) -> bool:
    """Whether a step is scattered over the tp group: its prompt tokens, those of rows that run more than one, number at least
    `least`. `query_lens` has the number of tokens that each row runs on the rank; `least` is the result of `scatter_from`."""
    return least is not None and sum(count for count in query_lens if count > 1) >= least
