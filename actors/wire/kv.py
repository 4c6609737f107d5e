"""Messages about KV on its way: from rank to rank, to the tiers behind the ranks, and back."""

from __future__ import annotations

from pydantic import Field

from actors.wire.message import Message


class KVReader(Message):
    """Where a rank wants its part of a hand-off: who it is, and a run of its staging buffer (the first byte of it), or, at
    None, the pages themselves."""

    world_rank: int
    agent_metadata: bytes
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
    dp_rank: int
    blocks: list[int]
    """Pages of the sequence there, as `Row.new_blocks` has them."""
    first: int
    tokens: int
    rope_length: int
    readers: list[KVReader]
    """One for each rank of the DP rank."""
    lease_s: float
    """Seconds from now in which a write may begin. The blocks are given to others some time after them, whatever happens."""
    reply_to: bytes = b""
    """Where the prefill pool's events go: a packed `actors.engine.link.token_stream.ReplyTo`."""


class KVExpect(Message):
    """Be ready for positions ``[first, tokens)`` of a sequence in `blocks`, which are its whole table."""

    ticket_id: str
    dp_rank: int
    blocks: list[int]
    first: int
    tokens: int


class KVSend(Message):
    """Send what `ticket` asks for of a sequence, as soon as it is computed; begin no write after `lease_s` seconds, and cut off
    whoever is still being written to `grace_s` after that."""

    ticket: KVTicket
    dp_rank: int
    sequence_id: int
    lease_s: float
    grace_s: float


class KVSave(Message):
    """Put away the blocks at `places` of a sequence, whose tokens have these hashes. `blocks`: its whole table."""

    dp_rank: int
    places: list[int]
    hashes: list[bytes]
    blocks: list[int]


class KVFetch(Message):
    """Fill the blocks from place `first` of a sequence on with what tiers have under these hashes, as far as they have it."""

    ticket_id: str
    dp_rank: int
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
    """Block parts fetched for them, by tier, and ``miss``; ``unwritten``: those saved that the shared tier did not get."""
