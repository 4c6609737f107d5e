"""The test cases of a verification: the same few sequences, run in each way in which an engine may run them.

The tokens are given, not sampled (teacher forcing). Every case must therefore produce the same values for the same
(sequence, position), and one plain run on a single rank is the reference for all cases::

    prefill   [aaaaaaaa|bbbbb]                       whole prompts, every position scored
    chunked   [aaa|bb] [aaa|bb] [aa|b]               chunked prefill
    decode    [aaaaaaaa|bbbbb] [a|b] [a|b]           one token at a time after the prompt
    prefix    [aaaa] then a again: [....aaaa]        prefix caching: the first blocks are found in the cache
    mixed     [aaa] [aa|bbbbb] [aaa|b] [a|b]         continuous batching: chunks of some sequences with single tokens of others
"""

from __future__ import annotations

import random
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from actors.wire.plans import Row, SequenceStart, StepPlan
from actors.wire.requests import SamplingParams

Key = tuple[int, int]
"""A token of a run, identified by (sequence id, position)."""

KINDS = ("prefill", "chunked", "decode", "prefix", "mixed")
_CHUNKS = (7, 16, 3, 11)


@dataclass(frozen=True)
class Text:
    """One test sequence: a prompt of `prompt_length` tokens, and the tokens that follow it."""

    tokens: tuple[int, ...]
    prompt_length: int


@dataclass(frozen=True)
class CaseBlockPool:
    """The KV blocks that a case may use. Block j of a sequence belongs to KV owner ``j % owners``; ids count within an owner.

    Each DP rank has its own blocks. The texts are split over the DP ranks, differently in each case.
    """

    block_size: int
    owners: int = 1
    dp_size: int = 1

    def blocks_for(self, tokens: int) -> int:
        """Returns the number of KV blocks that hold `tokens` tokens of one sequence, over all KV owners together."""
        return -(-tokens // self.block_size)

    def num_blocks(self, texts: Sequence[Text]) -> int:
        """Returns the number of KV blocks that every owner needs for all `texts` at once, plus one that stays unused."""
        return 1 + sum(-(-self.blocks_for(len(text.tokens)) // self.owners) for text in texts)


@dataclass(frozen=True)
class Case:
    """A named list of step plans, run in order; its sequences have no KV in the cache at the start."""

    name: str
    plans: tuple[StepPlan, ...]


def make_case(
    kind: str, texts: Sequence[Text], pool: CaseBlockPool, number: int, certain: Container[tuple[int, int]] = ()
) -> Case:
    """Returns the case `kind`, one of `KINDS` (`KeyError` otherwise), that runs `texts` on the blocks of `pool`. `number`,
    different for each case on the same ranks, makes its sequence ids unique, and seeds its choice of blocks and chunks.

    `certain` is a set of (index of the text, position) after which rounding cannot change the greedy token. After these,
    ``decode`` lets the ranks continue with the token that they sampled themselves, as an engine does whose scheduling runs a
    step ahead.
    """
    script = _Script(texts, pool, number, score=kind == "prefill", certain=certain if kind == "decode" else ())
    {"prefill": _prefill, "chunked": _chunked, "decode": _decode, "prefix": _prefix, "mixed": _mixed}[kind](script)
    return Case(kind, script.end())


def plain(texts: Sequence[Text], pool: CaseBlockPool, number: int, in_one_go: bool = True) -> Case:
    """Returns the reference case: one sequence of `texts` after the other, with every position scored. `pool` and `number` are
    those of `make_case`.

    With `in_one_go`, each sequence runs as one prompt, continuation included. That must not be done if the RoPE depends on the
    prompt length; the continuation is then run token by token.
    """
    if in_one_go:
        texts = [Text(text.tokens, len(text.tokens)) for text in texts]
    script = _Script(texts, pool, number, score=True)
    for index, text in enumerate(texts):
        script.step({index: text.prompt_length})
        for _ in range(script.left(index)):
            script.step({index: 1})
    return Case("plain", script.end())


def text_of(sequence_id: int, texts: Sequence[Text]) -> int:
    """Returns the index in `texts` of the text that the sequence `sequence_id` of a case runs."""
    return sequence_id % len(texts)


def planned_keys(plans: Sequence[StepPlan]) -> set[Key]:
    """Returns the (sequence id, position) of all tokens that `plans` run."""
    return {(row.sequence_id, row.start + at) for plan in plans for row in plan.rows for at in range(row.count)}


def sampled_keys(plans: Sequence[StepPlan]) -> list[Key]:
    """Returns the (sequence id, position) of all tokens after which `plans` sample the next one, in the order of the plans and
    their rows."""
    return [(row.sequence_id, row.start + row.count - 1) for plan in plans for row in plan.rows if row.sample]


@dataclass
class _Held:
    """The state of a sequence on the ranks: `known` tokens, of which `done` are in the cache."""

    sequence_id: int
    known: int
    done: int = 0
    blocks: list[int] = field(default_factory=list)
    fresh: bool = True
    """Whether no plan contains the sequence yet. Its first row then carries the whole block table, cached blocks included."""


class _Script:
    """Writes plans as an engine does: a sequence starts with its prompt, and later tokens are appended when they are run."""

    def __init__(
        self, texts: Sequence[Text], pool: CaseBlockPool, number: int, score: bool, certain: Container[tuple[int, int]] = ()
    ) -> None:
        self.texts, self.pool, self._certain = texts, pool, certain
        self.random = random.Random(number)
        self._scoring = SamplingParams(temperature=0.0, prompt_logprobs=0 if score else None)
        self._next_id = 1000 * number * len(texts)
        self._plans: list[StepPlan] = []
        self._ended: list[int] = []
        self._number = number
        self._free = [[list(range(pool.num_blocks(texts))) for _ in range(pool.owners)] for _ in range(pool.dp_size)]
        for blocks in (blocks for dp_rank in self._free for blocks in dp_rank):
            self.random.shuffle(blocks)
        self._held = self._new_sequences()

    def left(self, index: int) -> int:
        """Returns the number of tokens of the text `index`, continuation included, that no plan runs yet."""
        return len(self.texts[index].tokens) - self._held[index].done

    def prompt_left(self, index: int) -> int:
        """Returns the number of prompt tokens of the text `index` that no plan runs yet; negative once it decodes."""
        return self.texts[index].prompt_length - self._held[index].done

    def step(self, counts: dict[int, int]) -> None:
        """Append one plan that runs the next ``counts[index]`` tokens of each text `index` in `counts`."""
        started = [self._start(index) for index in counts if self._held[index].fresh]
        rows = [self._row(index, count) for index, count in counts.items()]
        for index in counts:
            self._held[index].fresh = False
        self._plans.append(StepPlan(step=len(self._plans), ended=self._ended, started=started, rows=rows))
        self._ended = []

    def start_anew_on_cached_blocks(self) -> None:
        """End every sequence with the next plan, and start the same texts again, under new ids, with their full blocks found in
        the cache."""
        before = self._held
        self._ended += [held.sequence_id for held in before.values() if not held.fresh]
        self._held = self._new_sequences()
        for index, held in self._held.items():
            full = before[index].done // self.pool.block_size
            held.done, held.blocks = full * self.pool.block_size, before[index].blocks[:full]

    def end(self) -> tuple[StepPlan, ...]:
        """Returns the plans written so far, in order."""
        return tuple(self._plans)

    def _new_sequences(self) -> dict[int, _Held]:
        first, self._next_id = self._next_id, self._next_id + len(self.texts)
        return {index: _Held(first + index, text.prompt_length) for index, text in enumerate(self.texts)}

    def _dp_rank(self, index: int) -> int:
        return (index + self._number) % self.pool.dp_size

    def _start(self, index: int) -> SequenceStart:
        text, held = self.texts[index], self._held[index]
        prompt = list(text.tokens[: text.prompt_length])
        return SequenceStart(
            sequence_id=held.sequence_id,
            dp_rank=self._dp_rank(index),
            tokens=prompt,
            prompt_length=text.prompt_length,
            sampling=self._scoring,
        )

    def _row(self, index: int, count: int) -> Row:
        text, held = self.texts[index], self._held[index]
        start, end = held.done, held.done + count
        append = list(text.tokens[held.known : end])
        had = 0 if held.fresh else len(held.blocks)
        while len(held.blocks) < self.pool.blocks_for(end):
            held.blocks.append(self._free[self._dp_rank(index)][len(held.blocks) % self.pool.owners].pop())
        own_choice = append and start == held.known and count == 1 and (index, start - 1) in self._certain
        held.known, held.done = max(held.known, end), end
        return Row(
            sequence_id=held.sequence_id,
            dp_rank=self._dp_rank(index),
            start=start,
            count=count,
            append=[] if own_choice else append,
            append_sampled=bool(own_choice),
            new_blocks=held.blocks[had:],
            sample=end >= text.prompt_length,
        )


def _prefill(script: _Script) -> None:
    script.step({index: text.prompt_length for index, text in enumerate(script.texts)})


def _chunked(script: _Script) -> None:
    while counts := {
        index: min(_CHUNKS[index % len(_CHUNKS)], script.prompt_left(index))
        for index in range(len(script.texts))
        if script.prompt_left(index) > 0
    }:
        script.step(counts)


def _decode(script: _Script) -> None:
    _prefill(script)
    while counts := {index: 1 for index in range(len(script.texts)) if script.left(index)}:
        script.step(counts)


def _prefix(script: _Script) -> None:
    """Run the ``prefix`` case. The last prompt token is always computed, because the next token is sampled from it."""
    size = script.pool.block_size
    cached = {index: (text.prompt_length - 1) // size * size for index, text in enumerate(script.texts)}
    if any(cached.values()):
        script.step({index: count for index, count in cached.items() if count})
        script.start_anew_on_cached_blocks()
    _finish(script)


def _finish(script: _Script) -> None:
    script.step({index: script.prompt_left(index) for index in range(len(script.texts))})
    for _ in range(2):
        counts = {index: 1 for index in range(len(script.texts)) if script.left(index)}
        if counts:
            script.step(counts)


def _mixed(script: _Script) -> None:
    while waiting := [index for index in range(len(script.texts)) if script.left(index)]:
        counts = {}
        for index in waiting:
            prompt = script.prompt_left(index)
            count = min(script.random.choice((0, 1, 5, 11, 24)), prompt) if prompt > 0 else script.random.choice((0, 1, 1))
            if count:
                counts[index] = count
        if counts:
            script.step(counts)
