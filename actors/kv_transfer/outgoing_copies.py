"""The copies that one rank sends for a KV transfer ticket, and the destination of each of their bytes.

A reader that stages a transfer reserves one run of its staging buffer. The run holds the copies of the hand-off map to this
reader in the map's order; within a copy the prefill chunks follow one another, and within a chunk the ranges of layers. Both
sides know this order, so no offset is negotiated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from actors.kv_transfer.endpoint import CopyTarget, KVEndpoint, Peer, Sending, StagingFullError
from actors.wire.kv import KVTicket
from placement.layout.layout import Layout
from placement.model.spec import ModelSpec
from placement.ownership.handoff import Copy, Side, handoff, holdings
from placement.ownership.handoff_pages import PageTable


@dataclass(frozen=True)
class OutgoingCopy:
    """A copy of the hand-off map that this rank sends, and its byte offset in the staging run of its reader."""

    copy: Copy
    offset: int


@dataclass(frozen=True)
class OutgoingPart:
    """Some layers and positions of an `OutgoingCopy`, sent in one write."""

    outgoing: OutgoingCopy
    copy: Copy
    num_bytes: int


class OutgoingCopies:
    """All copies that the rank `world_rank` of `source` sends for a ticket."""

    def __init__(self, endpoint: KVEndpoint, spec: ModelSpec, source: Side, world_rank: int, ticket: KVTicket) -> None:
        """Raises `ValueError` if the ticket does not match its layout."""
        destination = Side(Layout.parse(ticket.layout), ticket.page_tokens, ticket.dp_rank)
        own = next(held for held in holdings(spec, source) if held.world_rank == world_rank)
        self.layers = own.layers
        """The layers that this rank holds."""
        self._endpoint, self._ticket_id, self._ownership = endpoint, ticket.ticket_id, own.ownership
        self._readers = {reader.world_rank: reader for reader in ticket.readers}
        self._tables = {held.world_rank: PageTable(held.ownership, ticket.blocks) for held in holdings(spec, destination)}
        self._outgoing = list(
            _outgoing(handoff(spec, source, destination, range(ticket.first, ticket.tokens)), world_rank, endpoint)
        )
        self._peers: dict[int, Peer] = {}
        missing = sorted(self._tables.keys() - self._readers.keys())
        if missing:
            raise ValueError(f"the ticket for {ticket.layout} has no agent metadata of ranks {missing}")

    @property
    def reader_metadata(self) -> dict[int, bytes]:
        """Agent metadata of the ranks that this rank writes to, by world rank."""
        return {
            outgoing.copy.destination: self._readers[outgoing.copy.destination].agent_metadata for outgoing in self._outgoing
        }

    def connected(self, peers: dict[int, Peer]) -> None:
        """Set the connected peers, by the world rank of the reader. Must be called before the first `send`."""
        self._peers = peers

    def parts(self, layers: range, positions: range) -> list[OutgoingPart]:
        """Returns the part of each copy that lies in `layers` (of the whole model) at `positions` of the sequence. Copies
        without such a part are omitted."""
        cut = ((outgoing, outgoing.copy.within(layers, positions)) for outgoing in self._outgoing)
        return [OutgoingPart(outgoing, copy, self._endpoint.num_bytes(copy)) for outgoing, copy in cut if copy is not None]

    def send(self, part: OutgoingPart, blocks: list[int]) -> Sending:
        """Begin to write a part, and return the write in progress. `blocks` is the block table of the sequence on this side, as
        in step plans. If the staging buffer is full, the part is written straight into the reader's pages.

        Raises `TransferError` if the write cannot be begun, `ValueError` for byte ranges outside the pools, and `KeyError` if
        the reader is not among the peers of `connected`.
        """
        rank = part.copy.destination
        staged_at = self._readers[rank].staged_at
        if staged_at is not None:
            staged_at += part.outgoing.offset + self._place_of(part.copy, part.outgoing.copy)
        arguments = (self._peers[rank], self._ticket_id, part.copy, PageTable(self._ownership, blocks))
        try:
            return self._endpoint.send(*arguments, CopyTarget(staged_at=staged_at), self._tables[rank])
        except StagingFullError:  # writing straight into the peer's pages needs no staging
            return self._endpoint.send(*arguments, CopyTarget(staged_at=None), self._tables[rank])

    def _place_of(self, part: Copy, whole: Copy) -> int:
        """Returns the byte offset of a part in the run of its copy: earlier positions come first, then earlier layers."""
        before = len(whole.positions.within(range(part.positions.window.start)))
        layers = len(whole.layers) * before + (part.layers.start - whole.layers.start) * len(part.positions)
        return layers * self._endpoint.num_bytes(part) // (len(part.layers) * len(part.positions))


def _outgoing(copies: list[Copy], world_rank: int, endpoint: KVEndpoint) -> Iterator[OutgoingCopy]:
    """Yields the copies of one source rank, each with its offset among all the copies to the same destination."""
    used: dict[int, int] = {}
    for copy in copies:
        if copy.source == world_rank:
            yield OutgoingCopy(copy, used.get(copy.destination, 0))
        used[copy.destination] = used.get(copy.destination, 0) + endpoint.num_bytes(copy)
