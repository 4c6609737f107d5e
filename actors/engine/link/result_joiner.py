"""Joins the results of the DP ranks into one result per step.

output rank of DP rank 0   step 7 ── step 8 ── step 9          each DP rank runs the plans in order, at its own pace
output rank of DP rank 1   step 7 ── step 8                    a DP rank without rows in a plan sends an empty result
                        └ joined ┘└ joined ┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from actors.engine.link.link import LinkError
from actors.wire.results import StepResult


class ResultJoiner:
    """Holds the results of the DP ranks' output ranks until all DP ranks have sent that of the step."""

    def __init__(self, output_ranks: Sequence[int]) -> None:
        """Create a joiner. `output_ranks` holds the output rank of each DP rank (`placement.layout.mesh.output_ranks`)."""
        self._waiting: dict[int, deque[StepResult]] = {output_rank: deque() for output_rank in output_ranks}

    def __contains__(self, world_rank: int) -> bool:
        """Return whether a rank is an output rank."""
        return world_rank in self._waiting

    @property
    def missing(self) -> list[int]:
        """World ranks of the output ranks whose result of the oldest incomplete step is missing."""
        return [output_rank for output_rank, results in self._waiting.items() if not results]

    def add(self, output_rank: int, result: StepResult) -> StepResult | None:
        """Add the result that the output rank with world rank `output_rank` has sent. Returns the joined result of the step if
        this was the last one missing, else None.

        Raises `LinkError` if the DP ranks answer different steps, and `KeyError` if the rank is no output rank.
        """
        self._waiting[output_rank].append(result)
        return (
            None if self.missing else joined({output_rank: results.popleft() for output_rank, results in self._waiting.items()})
        )


def joined(results: dict[int, StepResult]) -> StepResult:
    """Return one result for a step from the results of its DP ranks, by output rank. Its time is that of the slowest DP rank.
    Raises `LinkError` if the results are of different steps."""
    steps = {result.step for result in results.values()}
    if len(steps) > 1:
        found = ", ".join(f"rank {output_rank} step {result.step}" for output_rank, result in results.items())
        raise LinkError(f"the DP ranks answer different steps: {found}")
    return StepResult(
        step=steps.pop(),
        sampled=[item for result in results.values() for item in result.sampled],
        prompt_logprobs=[item for result in results.values() for item in result.prompt_logprobs],
        seconds=max(result.seconds for result in results.values()),
    )
