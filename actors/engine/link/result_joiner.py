"""One result a step from those of its DP ranks.

output rank of DP rank 0   step 7 ── step 8 ── step 9          each DP rank runs the plans in order, at its own pace
output rank of DP rank 1   step 7 ── step 8                    a DP rank without rows in a plan answers too, with nothing
                        └ joined ┘└ joined ┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from actors.engine.link.link import LinkError
from actors.wire.results import StepResult


class ResultJoiner:
    """Holds the results of the DP ranks' output ranks until all DP ranks have answered the step."""

    def __init__(self, output_ranks: Sequence[int]) -> None:
        """`output_ranks`: the world rank that answers for each DP rank (`placement.layout.mesh.output_ranks`)."""
        self._waiting: dict[int, deque[StepResult]] = {output_rank: deque() for output_rank in output_ranks}

    def __contains__(self, world_rank: int) -> bool:
        """Whether a rank is one that answers."""
        return world_rank in self._waiting

    @property
    def missing(self) -> list[int]:
        """World ranks without which the oldest step cannot be joined."""
        return [output_rank for output_rank, results in self._waiting.items() if not results]

    def add(self, output_rank: int, result: StepResult) -> StepResult | None:
        """Take a DP rank's result; the whole step's if this was the last one missing. Raises `LinkError` where DP ranks
        disagree."""
        self._waiting[output_rank].append(result)
        return (
            None if self.missing else joined({output_rank: results.popleft() for output_rank, results in self._waiting.items()})
        )


def joined(results: dict[int, StepResult]) -> StepResult:
    """The result of a step from those of its DP ranks, by output rank. It took as long as the slowest."""
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
