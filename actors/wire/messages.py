"""The messages of the hot path, and how they become bytes: msgpack, checked against a schema on arrival.

    ingress ── GenerateRequest ──→ engine ── StepPlan ──→ every rank
    ingress ←─── TokenEvents ───── engine ←─ StepResult ─ the leader of each lane (joined: `actors.engine.link.joining`)
                                   engine ←─ ExpertReport ─ every rank with experts, where a plan asks for it
                                   engine ←─── KVReport ─── every rank of a pool, when a hand-off has come further
    decode engine ── KVTicket ──→ ingress ── GenerateRequest with it ──→ prefill engine

Tokens inside, text at the edge: nothing here is a string of the conversation.
"""

from __future__ import annotations

from typing import Literal, Self

import msgpack
from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "abort", "deadline", "error", "handoff"]
"""``handoff``: what a prefill pool was to do is done; its last event goes to the decode pool, never to an ingress."""


class Message(BaseModel):
    """A value that crosses a process boundary."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def pack(self) -> bytes:
        """This message as msgpack bytes."""
        packed: bytes = msgpack.packb(self.model_dump())
        return packed

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """The message in `data`. Raises `pydantic.ValidationError` or `msgpack.UnpackException` on anything else."""
        return cls.model_validate(msgpack.unpackb(data, strict_map_key=False))


class SamplingParams(Message):
    """How the next token is chosen. `seed` is always set: the ingress draws one where the caller gave none.

    `logprobs` and `prompt_logprobs`: None for none, else the number of alternatives beside the chosen token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = Field(default_factory=dict)
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    """Until this many tokens are out, `stop_token_ids` cannot be chosen."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request (the model's end tokens included, unless the caller ignores them)."""


class KVReader(Message):
    """Where a rank wants its part of a hand-off: who it is, and a run of its staging buffer (the first byte of it), or, at
    None, the pages themselves."""

    world_rank: int
    greeting: bytes
    staged_at: int | None = None


class KVTicket(Message):
    """Blocks that a decode pool has reserved for a prompt, and all that a prefill pool must know to fill them.

    Positions ``[first, tokens)`` are wanted: those before are on the decode side already. The prefill pool runs the request
    under the ticket's id.
    """

    ticket_id: str
    layout: str
    """Of the decode side, as text."""
    page_tokens: int
    lane: int
    blocks: list[int]
    """Pages of the sequence there, as `Row.new_blocks` has them."""
    first: int
    tokens: int
    rope_length: int
    readers: list[KVReader]
    """One for each rank of the lane."""
    lease_s: float
    """Seconds from now in which a write may begin. The blocks are given to others some time after them, whatever happens."""
    reply_to: bytes = b""
    """Where the prefill pool's events go: a packed `actors.engine.link.token_stream.ReplyTo`."""


class GenerateRequest(Message):
    """One sequence to continue. The prompt may hold tokens that were already sent to the client (a replay)."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    """Tokens to generate at most; 0 scores the prompt only."""
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    """Lower is served first."""
    tenant: str = ""
    """Fairness is kept between tenants."""
    cache_salt: str = ""
    """Prefix-cache blocks are shared only between requests with the same salt."""
    timeout_s: float | None = None
    """Seconds from arrival after which the request ends with finish reason ``deadline``."""
    reserves: bool = False
    """Ask a decode pool for a ticket first. It gives none where the prompt is short, or mostly in its cache."""
    ticket: KVTicket | None = None
    """Ask a prefill pool to run the prompt, sample one token, and hand both to who gave the ticket."""


class TokenLogprob(Message):
    """Natural-log probability of a token, its rank-ordered alternatives, and its own rank (1 = most likely)."""

    token: int
    logprob: float
    rank: int | None = None
    top: list[tuple[int, float]] = Field(default_factory=list)


class TokenEvent(Message):
    """What happened to a request in one step. Exactly one event of a request carries `finish`, and it is the last."""

    request_id: str
    tokens: list[int] = Field(default_factory=list)
    logprobs: list[TokenLogprob] = Field(default_factory=list)
    """One per token where logprobs were asked for, else empty."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One per prompt token (None for the first), on the first event, where asked for."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    finish: FinishReason | None = None
    stop_token: int | None = None
    """The token that stopped the request; it is also the last of `tokens`."""
    error: str | None = None
    refused: str | None = None
    """On the only event of a request that was never accepted: the code of the refusal, explained by `error`."""
    refused_by: str | None = None
    """Name of the replica that refused; another may accept."""
    ticket: KVTicket | None = None
    """Blocks are reserved: a prefill pool may have the request."""

    @property
    def is_empty(self) -> bool:
        """Whether this event only says that a replica has the request."""
        return not (self.tokens or self.finish or self.prompt_logprobs or self.ticket)


class TokenEvents(Message):
    """What happened in one step to the requests of one ingress."""

    events: list[TokenEvent]


class SequenceStart(Message):
    """A sequence the ranks do not know yet (new, or back after preemption), whole.

    It stays in its `lane` until it ends or is preempted: its KV is there, and only ranks of that lane know it.
    """

    sequence_id: int
    lane: int = 0
    tokens: list[int]
    """Prompt and whatever was generated before a preemption."""
    prompt_length: int
    sampling: SamplingParams
    rope_length: int | None = None
    """Length by which a rope that depends on it turns the tokens; None: the prompt's. See `RopeSpec.deciding_length`."""


class Row(Message):
    """One sequence's part of a step: run its tokens ``[start, start + count)``."""

    sequence_id: int
    lane: int = 0
    """That of its start; said again so that a plan tells by itself how many tokens each lane runs."""
    start: int
    """Tokens of the sequence whose KV is in the cache already."""
    count: int
    append: list[int] = Field(default_factory=list)
    """Tokens to add to the sequence first: those sampled since the ranks last heard of it."""
    append_sampled: bool = False
    """Add the token the ranks sampled last for the sequence: the plan was made before the engine knew it."""
    new_blocks: list[int] = Field(default_factory=list)
    """Blocks to add to the end of the sequence's block table.

    With several KV owners, block j of the table is a page of owner ``j % owners`` (`placement.ownership.context`).
    """
    sample: bool = False
    """Sample the token that follows the last one run."""


class ExpertMove(Message):
    """The experts of one layer go to other slots (`placement.experts.expert_map`), on every rank before the rows of the same
    plan.

    `experts`: the one in every slot from then on; `transfers`: (slot it comes from, slot it goes to), as the slots were before.
    """

    layer: int
    experts: list[int]
    transfers: list[tuple[int, int]]


class KVExpect(Message):
    """Be ready for positions ``[first, tokens)`` of a sequence in `blocks`, which are its whole table."""

    ticket_id: str
    lane: int
    blocks: list[int]
    first: int
    tokens: int


class KVSend(Message):
    """Send what `ticket` asks for of a sequence, as soon as it is computed; begin no write after `lease_s` seconds, and cut off
    whoever is still being written to `grace_s` after that."""

    ticket: KVTicket
    lane: int
    sequence_id: int
    lease_s: float
    grace_s: float


class StepPlan(Message):
    """What every rank does next. Applied in this order: `saves`, `fetches`, `expects`, `sends`, `forgets`, `moves`, `ended`,
    `started`, `rows`."""

    step: int
    moves: list[ExpertMove] = Field(default_factory=list)
    asks_experts: bool = False
    """Whether ranks with experts tell what these did (`ExpertReport`), after the step."""
    settled: int = -1
    """The newest step whose result has reached the engine; tokens of steps up to it wait at every stage to be taken."""
    ended: list[int] = Field(default_factory=list)
    """Sequences to forget (finished, cancelled or preempted)."""
    started: list[SequenceStart] = Field(default_factory=list)
    expects: list[KVExpect] = Field(default_factory=list)
    sends: list[KVSend] = Field(default_factory=list)
    forgets: list[str] = Field(default_factory=list)
    """Tickets given up: nothing more is sent, or expected, for them."""
    saves: list[KVSave] = Field(default_factory=list)
    fetches: list[KVFetch] = Field(default_factory=list)
    rows: list[Row]

    @property
    def turn(self) -> int:
        """Where the step's tokens begin to take turns (`placement.experts.expert_map`): it moves on as sequences do, and is
        the same whenever the same rows run."""
        return sum(row.start for row in self.rows)

    def new_lens(self, lanes: int) -> list[list[int]]:
        """New tokens of each row, lane by lane."""
        return [[row.count for row in self.rows if row.lane == lane] for lane in range(lanes)]

    def of_lane(self, lane: int) -> StepPlan:
        """What concerns the ranks of one lane. Ended sequences are named to all: names are unique across lanes."""
        started = [start for start in self.started if start.lane == lane]
        return self.model_copy(update={"started": started, "rows": [row for row in self.rows if row.lane == lane]})

    @property
    def is_work(self) -> bool:
        """Whether it holds anything that ranks must hear of now."""
        return bool(self.rows or self.expects or self.forgets or self.saves or self.fetches)


class LayerReport(Message):
    """What the experts of one layer did on one rank: tokens by expert, seconds of their maths and of the way back, which
    include those of waiting for slower ranks."""

    layer: int
    tokens: list[int]
    expert_s: float
    combine_s: float


class ExpertReport(Message):
    """What a rank's experts did in the `steps` steps since its last report, up to `step`; bytes are those it sent to others."""

    world_rank: int
    step: int
    steps: int
    layers: list[LayerReport]
    sent_bytes: int
    """Of tokens on their way to experts and back."""
    moved_bytes: int
    """Of experts that went to other ranks."""
    move_s: float


class KVSave(Message):
    """Put away the blocks at `places` of a sequence, whose tokens have these hashes. `blocks`: its whole table."""

    lane: int
    places: list[int]
    hashes: list[bytes]
    blocks: list[int]


class KVFetch(Message):
    """Fill the blocks from place `first` of a sequence on with what tiers have under these hashes, as far as they have it."""

    ticket_id: str
    lane: int
    first: int
    hashes: list[bytes]
    blocks: list[int]


class KVSent(Message):
    """A rank writes no more for a ticket. Seconds: in which writes were under way, and of those, which no computing hid: what
    was left after the last step, and what beginning them took of the rank's own thread."""

    ticket_id: str
    num_bytes: int = 0
    busy_s: float = 0.0
    exposed_s: float = 0.0
    error: str | None = None
    """Why not all was sent."""


class KVReport(Message):
    """How far the hand-offs of a rank have come since its last report."""

    world_rank: int
    opened: dict[str, KVReader] = Field(default_factory=dict)
    """By ticket: ready for its bytes."""
    arrived: list[str] = Field(default_factory=list)
    """Tickets of which every byte is in its page."""
    sent: list[KVSent] = Field(default_factory=list)
    fetched: dict[str, int] = Field(default_factory=dict)
    """By ticket of a `KVFetch`: blocks that were found, from the first on."""
    tier_hits: dict[str, int] = Field(default_factory=dict)
    """Pieces fetched for them, by tier, and ``miss``; ``unwritten``: those saved that the shared tier did not get."""


class Sampled(Message):
    """The token sampled for one sequence; `logprob` only where the request asked for logprobs."""

    sequence_id: int
    token: int
    logprob: TokenLogprob | None = None
    error: str | None = None
    """Why no token could be sampled (logits not finite). `token` means nothing then, and the request ends with this."""


class PromptLogprobs(Message):
    """Log-probabilities of the tokens at positions ``[first, first + len(entries))`` of a sequence."""

    sequence_id: int
    first: int
    entries: list[TokenLogprob]


class StepResult(Message):
    """What came out of a step, in one lane or in all. `seconds` is the time the (slowest) sampling rank spent on it."""

    step: int
    sampled: list[Sampled] = Field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = Field(default_factory=list)
    seconds: float = 0.0
