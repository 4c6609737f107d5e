"""The shape of one step, from which its cost follows: its rows, their lengths, and how their next tokens are sampled."""

from __future__ import annotations

from dataclasses import dataclass, replace

from placement.model.spec import DTYPE_BYTES, DType


@dataclass(frozen=True)
class Choosing:
    """Sampling parameters of one row, by which its next token is chosen. Fields have the same meaning as in a request; the
    default is greedy.

    `logprobs` is the number of alternatives reported beside the sampled token; None: no log-probabilities.
    """

    greedy: bool = True
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logprobs: int | None = None


GREEDY = Choosing()


@dataclass(frozen=True)
class RowShape:
    """One sequence in a step: `tokens` new tokens after `context` tokens whose KV is cached.

    `choosing` is None if the row samples no token in this step.
    """

    tokens: int
    context: int = 0
    choosing: Choosing | None = GREEDY
    dp_rank: int = 0


@dataclass(frozen=True)
class StepShape:
    """The rows of a step, in order, and the data type in which hidden states, keys and values are sent."""

    rows: tuple[RowShape, ...]
    dtype: DType = "bfloat16"
    block_size: int = 16
    """Tokens of a KV block: the unit in which a sequence is split over its owners."""

    @classmethod
    def of(
        cls,
        batch: int,
        tokens: int,
        context: int = 0,
        dtype: DType = "bfloat16",
        num_sampled: int | None = None,
        dp_size: int = 1,
    ) -> StepShape:
        """Returns a step of `batch` equal rows of `tokens` new tokens after `context` cached ones; row i is on DP rank ``i %
        dp_size``.

        `dtype` is that of hidden states, keys and values. The first `num_sampled` rows (None: all) sample a token greedily.
        """
        sampled = batch if num_sampled is None else num_sampled
        rows = tuple(RowShape(tokens, context, GREEDY if row < sampled else None, row % dp_size) for row in range(batch))
        return cls(rows, dtype)

    def of_dp_rank(self, dp_rank: int) -> StepShape:
        """Returns the part of the step that one DP rank runs: the same step with the rows of `dp_rank` only, in order."""
        return replace(self, rows=tuple(row for row in self.rows if row.dp_rank == dp_rank))

    def new_lens(self, dp_size: int) -> list[list[int]]:
        """Returns the number of new tokens of each row, in one list for each of `dp_size` DP ranks."""
        return [[row.tokens for row in self.rows if row.dp_rank == dp_rank] for dp_rank in range(dp_size)]

    @property
    def num_tokens(self) -> int:
        """Number of new tokens of all rows, of all DP ranks in this step."""
        return sum(row.tokens for row in self.rows)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of a hidden state."""
        return DTYPE_BYTES[self.dtype]
