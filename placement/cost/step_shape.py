"""What one step runs, as far as its cost goes: which rows, how long, and how their next token is chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace

from placement.model.spec import DTYPE_BYTES, DType


@dataclass(frozen=True)
class Choosing:
    """How the next token of a row is chosen. Fields mean what they do in a request; the default is greedy.

    `logprobs`: alternatives wanted beside the chosen token; None: no log-probabilities.
    """

    greedy: bool = True
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logprobs: int | None = None


GREEDY = Choosing()


@dataclass(frozen=True)
class RowShape:
    """One sequence in a step: `tokens` to run behind `context` tokens whose KV is in the cache. `choosing`: None, no token."""

    tokens: int
    context: int = 0
    choosing: Choosing | None = GREEDY
    dp_rank: int = 0


@dataclass(frozen=True)
class StepShape:
    """The rows of a step, in its order, and the type of hidden states, keys and values on the wire."""

    rows: tuple[RowShape, ...]
    dtype: DType = "bfloat16"
    block_size: int = 16
    """Tokens of a KV block: the unit in which owners share out a sequence."""

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
        """`batch` equal rows, split over the DP ranks, of which the first `num_sampled` (all, unless given) choose a token
        greedily."""
        sampled = batch if num_sampled is None else num_sampled
        rows = tuple(RowShape(tokens, context, GREEDY if row < sampled else None, row % dp_size) for row in range(batch))
        return cls(rows, dtype)

    def of_dp_rank(self, dp_rank: int) -> StepShape:
        """What one DP rank runs of it."""
        return replace(self, rows=tuple(row for row in self.rows if row.dp_rank == dp_rank))

    def new_lens(self, dp_size: int) -> list[list[int]]:
        """New tokens of each row, per DP rank."""
        return [[row.tokens for row in self.rows if row.dp_rank == dp_rank] for dp_rank in range(dp_size)]

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows together."""
        return sum(row.tokens for row in self.rows)

    @property
    def element_bytes(self) -> int:
        """Bytes of one number of a hidden state."""
        return DTYPE_BYTES[self.dtype]
