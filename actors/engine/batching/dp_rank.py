"""The scheduling state of one DP rank of data-parallel attention (attn_dp): its running sequences and its KV blocks.

A DP rank has its own devices, so all limits apply to each DP rank separately: KV blocks and the prefix cache in them, the
tokens of a step, the running sequences, and the choice of a victim when blocks run out. Without DP attention there is one DP
rank. In the model, DP ranks meet at the experts (`actors.model.moe.dispatch_selection`); their groups are in
`placement.layout.mesh`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from actors.engine.batching import micro_batches
from actors.engine.batching.draft import Draft
from actors.engine.config.engine_config import EngineConfig
from actors.engine.kv.block_manager import BlockPool
from actors.engine.sequences.sequence import Sequence, State


def choose(dp_ranks: Iterable[DPRank], sequence: Sequence) -> DPRank | None:
    """Return the one of `dp_ranks` on which `sequence` is to start: that with the lowest cost among those that have room; None
    if none has room.

    The cost is a number of blocks: those that other sequences hold there and that `sequence` does not share, plus those that it
    would have to fill. A cached prefix thus attracts the sequence, until other sequences hold more blocks there than the prefix
    saves. Ties go to the DP rank that runs fewer sequences, then to the lower index.
    """
    fitting = [dp_rank for dp_rank in dp_ranks if dp_rank.has_room(sequence)]
    return min(fitting, key=lambda dp_rank: (dp_rank.cost(sequence), len(dp_rank.running), dp_rank.index), default=None)


def dp_ranks_of(config: EngineConfig) -> list[DPRank]:
    """Return the `config.dp_size` DP ranks of a new engine, in order, each without sequences and with an empty KV cache."""
    return [DPRank(index, config) for index in range(config.dp_size)]


class DPRank:
    """Plans one DP rank's part of a step, and allocates and frees its blocks. The scheduler decides which sequences enter."""

    def __init__(self, index: int, config: EngineConfig) -> None:
        self.index = index
        self.pool = BlockPool(config.num_blocks, config.kv_owners)
        self.running: list[Sequence] = []
        """Running sequences, the most urgent first."""
        self.num_reserved = 0
        """Number of sequences whose blocks here are still being filled by a KV tier or a prefill pool."""
        self._config = config

    def plan_decodes(self, draft: Draft) -> None:
        """Add one token of each decoding sequence of the current micro-batch to `draft`, and allocate the blocks for it.

        If blocks run out, the least urgent sequences lose theirs: they are added to `draft.preempted`, for the caller to queue
        again.
        """
        decoding = [s for s in self.running if s.todo == 1 and not s.is_sampled_out(self._config.capacity)]
        stages, rows = self._config.stages, self._config.micro_batch_rows
        for sequence in micro_batches.next_decodes(decoding, draft.step, stages, rows):
            # An earlier sequence in this loop may have preempted this one; never the reverse, since the loop is by urgency.
            if sequence.state is State.RUNNING and self._grow(sequence, draft):
                draft.run(sequence, 1)

    def plan_chunks(self, draft: Draft, waiting_tokens: int) -> None:
        """Add the next chunks of the prompts that run here to `draft`, within its budget, and set its prompt budget.
        `waiting_tokens` is the number of queued prompt tokens, which pipeline stages take into account when they size
        chunks."""
        pending_tokens = waiting_tokens + sum(s.todo for s in self.running if s.todo > 1)
        limit = micro_batches.prompt_tokens(pending_tokens, self._config.stages, self._config.micro_batch_tokens)
        draft.prompt_budget = draft.budget if limit is None else min(draft.budget, limit)
        for sequence in self.running:
            if sequence.todo > 1 and draft.prompt_budget > 0:
                self.run_chunk(sequence, draft)

    def run_chunk(self, sequence: Sequence, draft: Draft) -> None:
        """Add the next chunk of a prompt to `draft`: at least one token, at most the prompt budget, which must not be used up.
        Unless it is the last chunk, it ends at a block boundary if possible."""
        count = min(sequence.todo, draft.prompt_budget, self._config.max_chunk_tokens)
        beyond_block = (sequence.num_planned + count) % self._config.block_size
        draft.run_prompt(sequence, count - beyond_block if count < sequence.todo and count > beyond_block else count)

    def is_open(self, draft: Draft) -> bool:
        """Return whether the step of `draft` may start another sequence here: prompt tokens and a place among `max_sequences`
        are left, and the step has preempted none."""
        num_here = len(self.running) + self.num_reserved
        return draft.prompt_budget > 0 and not draft.preempted and num_here < self._config.max_sequences

    def has_room(self, sequence: Sequence) -> bool:
        """Return whether there are enough blocks, cached or new, for all tokens that a waiting sequence has.

        One block is kept free for each running sequence to grow into; otherwise the next step might undo this admission.
        """
        hits = self._find(sequence)
        return self.pool.has_room(self._places(sequence, hits), hits, growing=[len(other.blocks) for other in self.running])

    def cost(self, sequence: Sequence) -> int:
        """Return the cost in blocks of running a waiting `sequence` here, as `choose` defines it."""
        hits = self._find(sequence)
        return self.pool.num_held - self.pool.count_held(hits) + len(self._places(sequence, hits))

    def take_in(self, sequence: Sequence) -> None:
        """Allocate the blocks for all tokens of a waiting sequence, after the cached blocks of its prefix, whose tokens then
        count as computed. `has_room` must be true. `run` makes the sequence a running one."""
        hits = self._find(sequence)
        self.pool.acquire(hits)
        sequence.blocks = hits + self.pool.allocate(self._places(sequence, hits))
        sequence.dp_rank = self.index
        sequence.num_registered = len(hits)
        sequence.num_planned = sequence.num_computed = len(hits) * self._config.block_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.num_computed

    def run(self, sequence: Sequence) -> None:
        """Add a sequence that has its blocks to the running ones, by urgency, and set its state to ``RUNNING``."""
        sequence.state = State.RUNNING
        insort(self.running, sequence, key=lambda s: s.urgency)

    def let_go(self, sequence: Sequence) -> None:
        """Remove a running sequence. Its blocks are freed here, unless its request carries a KV transfer ticket: ranks may
        still be sending them, and `PrefillTransfers` frees them later.

        This is safe while rows of the sequence are in flight: ranks run plans in order, so the next holder of the blocks writes
        to them later.
        """
        self.running.remove(sequence)
        if sequence.request.ticket is None:
            self.pool.free(sequence.blocks)

    def register(self, sequence: Sequence) -> range:
        """Register the full, computed blocks of a running sequence in the prefix cache. Returns the indices in its block table
        of those that were not registered before; an empty range if the prefix cache is off."""
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
        """Allocate blocks for all tokens of `sequence`, preempting the least urgent sequences if necessary.

        Returns False if `sequence` itself was preempted.
        """
        needed = range(len(sequence.blocks), self._config.blocks_for(sequence.length))
        while not self.pool.has_room(needed):
            # Skip sequences whose blocks are being sent: preempting them frees nothing. `sequence` itself is always eligible.
            victim = next(s for s in reversed(self.running) if s.request.ticket is None)
            self.let_go(victim)
            victim.state = State.WAITING
            draft.preempted.append(victim)
            if victim is sequence:
                return False
        sequence.blocks += self.pool.allocate(needed)
        return True

    def _places(self, sequence: Sequence, hits: list[int]) -> range:
        """Return the indices in the block table that need a new block."""
        tokens = min(len(sequence.tokens) + sequence.spare_tokens, self._config.capacity)
        return range(len(hits), self._config.blocks_for(max(tokens, len(sequence.tokens))))

    def _find(self, sequence: Sequence) -> list[int]:
        """Return the cached blocks of the sequence's prefix.

        The last token is excluded, since its logits are needed. Returns nothing if the prompt is scored, since
        this needs all logits.
        """
        if not self._config.prefix_cache or sequence.scores_prompt:
            return []
        return self.pool.lookup(sequence.chain.hashes[: (len(sequence.tokens) - 1) // self._config.block_size])
