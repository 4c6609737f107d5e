"""One DP rank (attn_dp): the sequences that run there, and the KV blocks they hold. Without DP ranks there is one.

A DP rank has devices of its own, so everything that counts devices counts in it alone: blocks and what is cached in them, the
tokens of a step, the sequences at once, and who is preempted when blocks run out.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from actors.engine.batching import micro_batches
from actors.engine.batching.draft import Draft
from actors.engine.config.engine_config import EngineConfig
from actors.engine.kv.blocks import BlockPool
from actors.engine.sequences.sequence import Sequence, State


def choose(dp_ranks: Iterable[DPRank], sequence: Sequence) -> DPRank | None:
    """Where a sequence starts: of the DP ranks with room for it, the one with least to hold and compute besides what is cached.

    Counted in blocks: those that others hold there and it does not share, and those it would have to fill. So a cached front
    draws it to its DP rank, until others there hold more than the front is long. Ties go to the DP rank that runs fewer
    sequences, then to the first.
    """
    fitting = [dp_rank for dp_rank in dp_ranks if dp_rank.has_room(sequence)]
    return min(fitting, key=lambda dp_rank: (dp_rank.cost(sequence), len(dp_rank.running), dp_rank.index), default=None)


def dp_ranks_of(config: EngineConfig) -> list[DPRank]:
    """The DP ranks of an engine, with no sequence in any."""
    return [DPRank(index, config) for index in range(config.dp_size)]


class DPRank:
    """Fills its part of a step, and gives and takes blocks. The scheduler decides who comes in."""

    def __init__(self, index: int, config: EngineConfig) -> None:
        self.index = index
        self.pool = BlockPool(config.num_blocks, config.kv_owners)
        self.running: list[Sequence] = []
        """Most urgent first."""
        self.num_reserved = 0
        """Sequences that have blocks here and wait for others to fill them."""
        self._config = config

    def plan_decodes(self, draft: Draft) -> None:
        """A token of each decoding sequence whose turn it is."""
        decoding = [s for s in self.running if s.todo == 1 and not s.is_sampled_out(self._config.capacity)]
        stages, rows = self._config.stages, self._config.micro_batch_rows
        for sequence in micro_batches.next_decodes(decoding, draft.step, stages, rows):
            # An earlier one of this loop may have preempted it. Never the reverse: the loop goes by urgency.
            if sequence.state is State.RUNNING and self._grow(sequence, draft):
                draft.run(sequence, 1)

    def plan_chunks(self, draft: Draft, waiting_tokens: int) -> None:
        """Chunks of prompts that have begun; `waiting_tokens`, not begun, may come here too."""
        in_sight = waiting_tokens + sum(s.todo for s in self.running if s.todo > 1)
        limit = micro_batches.prompt_tokens(in_sight, self._config.stages, self._config.micro_batch_tokens)
        draft.prompt_budget = draft.budget if limit is None else min(draft.budget, limit)
        for sequence in self.running:
            if sequence.todo > 1 and draft.prompt_budget > 0:
                self.run_chunk(sequence, draft)

    def run_chunk(self, sequence: Sequence, draft: Draft) -> None:
        """Run at least 1 token of a prompt; unless it is the last chunk it ends with a block where it can."""
        count = min(sequence.todo, draft.prompt_budget, self._config.max_chunk_tokens)
        beyond_block = (sequence.num_planned + count) % self._config.block_size
        draft.run_prompt(sequence, count - beyond_block if count < sequence.todo and count > beyond_block else count)

    def is_open(self, draft: Draft) -> bool:
        """Whether this step may start sequences here: not in one that preempted."""
        num_here = len(self.running) + self.num_reserved
        return draft.prompt_budget > 0 and not draft.preempted and num_here < self._config.max_sequences

    def has_room(self, sequence: Sequence) -> bool:
        """Whether there are blocks for all its tokens, found or new.

        One block is left for each running sequence to grow into: else the next step would take this admission back.
        """
        hits = self._find(sequence)
        return self.pool.has_room(self._places(sequence, hits), hits, growing=[len(other.blocks) for other in self.running])

    def cost(self, sequence: Sequence) -> int:
        """See `choose`."""
        hits = self._find(sequence)
        return self.pool.num_held - self.pool.count_held(hits) + len(self._places(sequence, hits))

    def take_in(self, sequence: Sequence) -> None:
        """Give a sequence the blocks of all its tokens, for which there is room."""
        hits = self._find(sequence)
        self.pool.acquire(hits)
        sequence.blocks = hits + self.pool.allocate(self._places(sequence, hits))
        sequence.dp_rank = self.index
        sequence.num_registered = len(hits)
        sequence.num_planned = sequence.num_computed = len(hits) * self._config.block_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.num_computed

    def run(self, sequence: Sequence) -> None:
        """Run a sequence that has its blocks from here on."""
        sequence.state = State.RUNNING
        insort(self.running, sequence, key=lambda s: s.urgency)

    def let_go(self, sequence: Sequence) -> None:
        """Take a running sequence out: its blocks back, unless ranks still have to send them (`prefill_transfers.py`).

        Safe with its rows in flight: ranks run plans in order, so whoever gets the blocks writes them later.
        """
        self.running.remove(sequence)
        if sequence.request.ticket is None:
            self.pool.free(sequence.blocks)

    def register(self, sequence: Sequence) -> range:
        """Name the blocks that are full now, so that others can find them. Returns the places of those that were not before."""
        full = sequence.num_computed // self._config.block_size
        if not self._config.prefix_cache or full == sequence.num_registered:
            return range(0)
        sequence.chain.extend(sequence.tokens[: full * self._config.block_size])
        for index in range(sequence.num_registered, full):
            self.pool.register(sequence.blocks[index], sequence.chain.hashes[index])
        fresh = range(sequence.num_registered, full)
        sequence.num_registered = full
        return fresh

    def _grow(self, sequence: Sequence, draft: Draft) -> bool:
        """Make room for all tokens of `sequence`. False where it was itself the least urgent and had to go."""
        needed = range(len(sequence.blocks), self._config.blocks_for(sequence.length))
        while not self.pool.has_room(needed):
            # Not one whose blocks are being sent: they would not come back. Itself it always may be.
            victim = next(s for s in reversed(self.running) if s.request.ticket is None)
            self.let_go(victim)
            victim.state = State.WAITING
            draft.preempted.append(victim)
            if victim is sequence:
                return False
        sequence.blocks += self.pool.allocate(needed)
        return True

    def _places(self, sequence: Sequence, hits: list[int]) -> range:
        """Places in the sequence that need a new block."""
        tokens = min(len(sequence.tokens) + sequence.spare_tokens, self._config.capacity)
        return range(len(hits), self._config.blocks_for(max(tokens, len(sequence.tokens))))

    def _find(self, sequence: Sequence) -> list[int]:
        """Cached blocks of the sequence's front. Never its last token, whose logits are wanted; none where all logits are."""
        if not self._config.prefix_cache or sequence.scores_prompt:
            return []
        return self.pool.lookup(sequence.chain.hashes[: (len(sequence.tokens) - 1) // self._config.block_size])
