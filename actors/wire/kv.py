"""Messages of KV transfer: prefill/decode disaggregation (KV transfer tickets) and KV offload to host memory and disk."""

from __future__ import annotations

from pydantic import Field

from actors.wire.message import Message


class KVReader(Message):
    """The destination of one rank's part of a hand-off: the rank, its transfer-agent metadata, and the target memory."""

    world_rank: int
    agent_metadata: bytes
    staged_at: int | None = None
    """Offset in bytes of the reserved range of the rank's staging buffer; None if the writer writes into the pages directly."""


class KVTicket(Message):
    """A KV transfer ticket: blocks that a decode pool has reserved for a prompt, and what a prefill pool needs to fill them.

    The ticket asks for positions ``[first, tokens)``; the decode side already holds the earlier ones. The prefill pool runs the
    request under the ticket's id.
    """

    ticket_id: str
    layout: str
    """Layout of the decode side, as text."""
    page_tokens: int
    dp_rank: int
    blocks: list[int]
    """Pages of the sequence on the decode side, numbered as in `Row.new_blocks`."""
    first: int
    tokens: int
    rope_length: int
    readers: list[KVReader]
    """One destination for each rank of the decode side's DP rank."""
    lease_s: float
    """Seconds from now during which a write may begin. Some time after that the blocks are reused in any case."""
    reply_to: bytes = b""
    """Address to which the prefill pool sends its events: a packed `actors.engine.link.token_stream.ReplyTo`."""


class KVExpect(Message):
    """Orders ranks to prepare to receive positions ``[first, tokens)`` of a sequence. `blocks` is its whole block table."""

    ticket_id: str
    dp_rank: int
    blocks: list[int]
    first: int
    tokens: int


class KVSend(Message):
    """Orders ranks to send the positions that `ticket` asks for, as soon as each is computed.

    Ranks begin no write after `lease_s` seconds, and abort writes that are still running `grace_s` seconds after that.
    """

    ticket: KVTicket
    dp_rank: int
    sequence_id: int
    lease_s: float
    grace_s: float


class KVSave(Message):
    """Orders ranks to save KV blocks of a sequence to the KV tiers.

    `places`: indices of the blocks in the block table; `hashes`: the prefix hash of each; `blocks`: the whole block table.
    """

    dp_rank: int
    places: list[int]
    hashes: list[bytes]
    blocks: list[int]


class KVFetch(Message):
    """Orders ranks to fill the blocks of a sequence from index `first` of its block table on, from the KV tiers.

    `hashes` holds the prefix hash of each wanted block. A rank stops at the first block that no tier holds.
    """

    ticket_id: str
    dp_rank: int
    first: int
    hashes: list[bytes]
    blocks: list[int]


class KVSent(Message):
    """Reports that a rank has stopped writing for a ticket.

    `busy_s`: seconds during which writes were in flight. `exposed_s`: the part of these that did not overlap with computation,
    which is the time after the last step plus the time the rank's own thread spent on starting writes.
    """

    ticket_id: str
    num_bytes: int = 0
    busy_s: float = 0.0
    exposed_s: float = 0.0
    error: str | None = None
    """Reason for which the transfer is incomplete; None if everything was sent."""


class KVReport(Message):
    """The progress of a rank's KV transfers since its previous report."""

    world_rank: int
    opened: dict[str, KVReader] = Field(default_factory=dict)
    """Destination of each ticket for which the rank is now ready to receive, by ticket id."""
    arrived: list[str] = Field(default_factory=list)
    """Tickets whose bytes are all in their pages."""
    sent: list[KVSent] = Field(default_factory=list)
    fetched: dict[str, int] = Field(default_factory=dict)
    """Number of leading blocks found for each `KVFetch`, by its ticket id."""
    tier_hits: dict[str, int] = Field(default_factory=dict)
    """Block parts fetched, by tier; ``miss``: parts that no tier held; ``unwritten``: parts not saved in the shared tier."""
