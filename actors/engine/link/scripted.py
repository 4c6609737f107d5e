"""Simulated ranks in this process, for tests of code that uses an engine: no torch, no model, exact results.

The "model" is a hash of the whole history, so that a wrong token, position, block or cache hit changes everything after it. It
stores its KV in blocks as real ranks do (one object for all DP ranks and KV owners): the state after each token is written to
the token's slot, and every row first reads its whole context back through its block table, on its DP rank. A plan that a real
rank could not run raises `ScriptError`.
"""

from __future__ import annotations

import itertools
import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from actors.engine.link.link import LinkClosed, LinkError, LinkTimeout
from actors.wire.experts import ExpertReport
from actors.wire.kv import KVReport
from actors.wire.plans import Row, SequenceStart, StepPlan
from actors.wire.requests import SamplingParams, TokenLogprob
from actors.wire.results import PromptLogprobs, Sampled, StepResult

_PRIME = (1 << 61) - 1


class ScriptError(LinkError):
    """Raised if a plan is inconsistent with the plans before it."""


def state_after(state: int, token: int) -> int:
    """Return the simulated model's state, a hash of the tokens so far, after it reads `token` in `state`. The initial state is
    0."""
    return (state * 1_000_003 + token * 7919 + 12_345) % _PRIME


def next_token(state: int, vocab_size: int) -> int:
    """Return the token id below `vocab_size` that the simulated model generates in `state`."""
    return (state >> 7) % vocab_size


def continuation(prompt: list[int], count: int, vocab_size: int) -> list[int]:
    """Return the `count` token ids that the simulated model (a hash of the history) generates after `prompt`, run alone."""
    state = 0
    for token in prompt:
        state = state_after(state, token)
    tokens = []
    for _ in range(count):
        tokens.append(next_token(state, vocab_size))
        state = state_after(state, tokens[-1])
    return tokens


def logprob_of(state: int, token: int) -> TokenLogprob:
    """Return an artificial logprob of `token` in `state`, at most 0 and different for different histories."""
    return TokenLogprob(token=token, logprob=-((state + token) % 10_007) / 100)


def prompt_logprobs(prompt: list[int]) -> list[TokenLogprob | None]:
    """Return the logprobs that the simulated model reports for `prompt`: None for the first token, then one entry per token."""
    state, scores = 0, list[TokenLogprob | None]([None])
    for token, following in itertools.pairwise(prompt):
        state = state_after(state, token)
        scores.append(logprob_of(state, following))
    return scores


@dataclass
class _Known:
    """The state of a sequence on a rank."""

    tokens: list[int]
    prompt_length: int
    sampling: SamplingParams
    dp_rank: int
    blocks: list[int] = field(default_factory=list)
    sampled: int | None = None
    """The token sampled last, until a plan appends it."""


class ScriptedRank:
    """Applies plans in order and checks them strictly.

    `num_blocks` is the number of blocks of each of the `owners` ranks of each of the `dp_size` DP ranks.
    """

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int = 1000, owners: int = 1, dp_size: int = 1) -> None:
        self.num_blocks, self.block_size, self.vocab_size = num_blocks, block_size, vocab_size
        self.owners, self.dp_size = owners, dp_size
        self.sequences: dict[int, _Known] = {}
        self.plans: list[StepPlan] = []
        self._slots: dict[tuple[int, int, int], int] = {}
        """State of the model by (DP rank, owner, slot), in place of keys and values."""

    def run(self, plan: StepPlan) -> StepResult:
        """Run the next plan and return its result. Raises `ScriptError` if the plan is inconsistent with those before it, or
        with the KV in its blocks, and `KeyError` for a row of an unknown sequence."""
        if plan.step != len(self.plans):
            raise ScriptError(f"plan {plan.step} after {len(self.plans)} plans")
        self.plans.append(plan)
        for ended in plan.ended:
            if self.sequences.pop(ended, None) is None:
                raise ScriptError(f"sequence {ended} ends but is not known")
        for start in plan.started:
            self._start(start)
        if len({row.sequence_id for row in plan.rows}) != len(plan.rows):
            raise ScriptError("a sequence has two rows in one step")
        sampled: list[Sampled] = []
        scored: list[PromptLogprobs] = []
        for row in plan.rows:
            state = self._run_row(row, scored)
            if row.sample:
                token = self.sequences[row.sequence_id].sampled = next_token(state, self.vocab_size)
                wanted = self.sequences[row.sequence_id].sampling.logprobs is not None
                logprob = logprob_of(state, token) if wanted else None
                sampled.append(Sampled(sequence_id=row.sequence_id, token=token, logprob=logprob))
        return StepResult(step=plan.step, sampled=sampled, prompt_logprobs=scored)

    def _start(self, start: SequenceStart) -> None:
        if start.sequence_id in self.sequences:
            raise ScriptError(f"sequence {start.sequence_id} starts twice")
        if not 0 <= start.dp_rank < self.dp_size:
            raise ScriptError(f"sequence {start.sequence_id} starts on DP rank {start.dp_rank} of {self.dp_size}")
        self.sequences[start.sequence_id] = _Known(list(start.tokens), start.prompt_length, start.sampling, start.dp_rank)

    def _run_row(self, row: Row, scored: list[PromptLogprobs]) -> int:
        known = self.sequences[row.sequence_id]
        if row.dp_rank != known.dp_rank:
            raise ScriptError(f"row {row} of a sequence on DP rank {known.dp_rank}")
        known.tokens += row.append
        if row.append_sampled:
            if known.sampled is None:
                raise ScriptError(f"row {row} wants a token that was not sampled")
            known.tokens.append(known.sampled)
        known.sampled = None
        known.blocks += row.new_blocks
        end = row.start + row.count
        if row.count < 1 or end > len(known.tokens) or (row.sample and end != len(known.tokens)):
            raise ScriptError(f"row {row} of a sequence of {len(known.tokens)} tokens")
        state = self._read_context(known, row.start)
        entries = []
        for position in range(row.start, end):
            state = state_after(state, known.tokens[position])
            self._slots[self._slot(known, position)] = state
            if position + 1 < known.prompt_length:
                entries.append(logprob_of(state, known.tokens[position + 1]))
        if known.sampling.prompt_logprobs is not None and entries:
            scored.append(PromptLogprobs(sequence_id=row.sequence_id, first=row.start + 1, entries=entries))
        return state

    def _read_context(self, known: _Known, length: int) -> int:
        state = 0
        for position in range(length):
            state = state_after(state, known.tokens[position])
            if self._slots.get(self._slot(known, position)) != state:
                raise ScriptError(f"the KV of token {position} is not in block {known.blocks[position // self.block_size]}")
        return state

    def _slot(self, known: _Known, position: int) -> tuple[int, int, int]:
        place = position // self.block_size
        if place >= len(known.blocks):
            raise ScriptError(f"token {position} has no block (blocks {known.blocks})")
        block = known.blocks[place]
        if not 0 <= block < self.num_blocks:
            raise ScriptError(f"block {block} of {self.num_blocks}")
        return known.dp_rank, place % self.owners, block * self.block_size + position % self.block_size


class ScriptedLink:
    """A `RankLink` to one scripted rank, which answers at once until `mute` is called."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        vocab_size: int = 1000,
        before_step: Callable[[StepPlan], None] = lambda plan: None,
        owners: int = 1,
        dp_size: int = 1,
    ) -> None:
        """Create the link and its rank.

        `before_step` is called before each step: it may wait (to simulate a slow step) or raise a `LinkError` (a lost rank).
        """
        self.rank = ScriptedRank(num_blocks, block_size, vocab_size, owners, dp_size)
        self.is_closed = False
        self.busy_s: dict[int, float] = {}
        self.reports: deque[ExpertReport] = deque()
        self.kv_reports: deque[KVReport] = deque()
        self._before_step = before_step
        self._is_mute = False
        self._results: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def mute(self) -> None:
        """Stop sending results for later plans, to simulate ranks that hang."""
        self._is_mute = True

    def send(self, plan: StepPlan) -> None:
        """See `RankLink.send`. Runs the plan before it returns; raises `ScriptError` if it is inconsistent, and `LinkClosed`
        after `close`."""
        if self.is_closed:
            raise LinkClosed("the scripted ranks are closed")
        self._before_step(plan)
        result = self.rank.run(StepPlan.unpack(plan.pack()))
        if not self._is_mute:
            self._results.put(result.pack())

    def receive(self, timeout_s: float) -> StepResult:
        """See `RankLink.receive`. Raises only `LinkTimeout`."""
        try:
            return StepResult.unpack(self._results.get(timeout=timeout_s))
        except queue.Empty:
            raise LinkTimeout(f"no scripted result within {timeout_s:g} s") from None

    def listen(self, timeout_s: float) -> None:
        """See `RankLink.listen`. Does nothing: scripted ranks belong to no pool and send no KV reports."""

    def close(self) -> None:
        """See `RankLink.close`. Later calls of `send` raise `LinkClosed`."""
        self.is_closed = True
