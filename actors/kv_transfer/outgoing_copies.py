"""What one rank sends for a ticket, and where each of its bytes goes.

Where a reader stages, its run has a place for every copy of the map to it, in the map's order; a chunk has its place in that of
its copy, and a range of layers in that of its chunk. Both sides know the map's order, so no place is negotiated.
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
    """A copy of the map that this rank sends, and where it begins in the run of its reader."""

    copy: Copy
    offset: int


@dataclass(frozen=True)
class OutgoingPart:
    """Some layers and positions of such a copy, to be sent in one write."""

    outgoing: OutgoingCopy
    copy: Copy
    num_bytes: int


class OutgoingCopies:
    """All that the rank `world_rank` of `source` sends for a ticket."""

    def __init__(self, endpoint: KVEndpoint, spec: ModelSpec, source: Side, world_rank: int, ticket: KVTicket) -> None:
        """Raises `ValueError` where the ticket and its layout do not agree."""
        destination = Side(Layout.parse(ticket.layout), ticket.page_tokens, ticket.dp_rank)
        own = next(held for held in holdings(spec, source) if held.world_rank == world_rank)
        self.layers = own.layers
        """Those that this rank has."""
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
        """Of the ranks that this one writes to."""
        return {
            outgoing.copy.destination: self._readers[outgoing.copy.destination].agent_metadata for outgoing in self._outgoing
        }

    def connected(self, peers: dict[int, Peer]) -> None:
        """Have them, by world rank, before the first `send`."""
        self._peers = peers

    def parts(self, layers: range, positions: range) -> list[OutgoingPart]:
        """The part of each copy that is in `layers` at `positions`; copies without any are left out."""
        cut = ((outgoing, outgoing.copy.within(layers, positions)) for outgoing in self._outgoing)
        return [OutgoingPart(outgoing, copy, self._endpoint.num_bytes(copy)) for outgoing, copy in cut if copy is not None]

    def send(self, part: OutgoingPart, blocks: list[int]) -> Sending:
        """Begin to write a part; `blocks` are the sequence's pages here. Raises `TransferError` and `ValueError`."""
        rank = part.copy.destination
        staged_at = self._readers[rank].staged_at
        if staged_at is not None:
            staged_at += part.outgoing.offset + self._place_of(part.copy, part.outgoing.copy)
        arguments = (self._peers[rank], self._ticket_id, part.copy, PageTable(self._ownership, blocks))
        try:
            return self._endpoint.send(*arguments, CopyTarget(staged_at=staged_at), self._tables[rank])
        except StagingFullError:  # the pages themselves are always there
            return self._endpoint.send(*arguments, CopyTarget(staged_at=None), self._tables[rank])

    def _place_of(self, part: Copy, whole: Copy) -> int:
        """Bytes of a copy's run before those of a part: what is at earlier positions, then what is in earlier layers."""
        before = len(whole.positions.within(range(part.positions.window.start)))
        layers = len(whole.layers) * before + (part.layers.start - whole.layers.start) * len(part.positions)
        return layers * self._endpoint.num_bytes(part) // (len(part.layers) * len(part.positions))


def _outgoing(copies: list[Copy], world_rank: int, endpoint: KVEndpoint) -> Iterator[OutgoingCopy]:
    """Those of one source, with where each begins among all that go to its destination."""
    used: dict[int, int] = {}
    for copy in copies:
        if copy.source == world_rank:
            yield OutgoingCopy(copy, used.get(copy.destination, 0))
        used[copy.destination] = used.get(copy.destination, 0) + endpoint.num_bytes(copy)
