"""One prompt on its way from this rank to those of a ticket: chunk by chunk, and in each range by range of its layers.

    step      chunk 0, layers 0-7 8-15 16-23 24-29   chunk 1, layers 0-7 8-15 16-23 24-29
    writes                     └────┐└───┐└────┐└────┐               └────┐└───┐└────┐└────┐
              ────────────────────────────────────────────────────────────────────────→ exposed: after the last range of the
                                                                    last chunk, nothing is computed behind which it could hide

Where a reader stages, its run has a place for every copy of the map to it, in the map's order; a chunk has its place in that of
its copy, and a range of layers in that of its chunk. Both sides know the map's order, so no place is negotiated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from actors.kv_transfer.endpoint import CopyTarget, KVEndpoint, Peer, Sending, StagingFullError
from actors.kv_transfer.transport import TransferError
from actors.wire.kv import KVSend, KVSent
from placement.layout.layout import Layout
from placement.model.spec import ModelSpec
from placement.ownership.handoff import Copy, Side, handoff, holdings
from placement.ownership.handoff_pages import PageTable


@dataclass(frozen=True)
class OutgoingCopy:
    """A copy of the map that this rank sends, and where it begins in the run of its reader."""

    copy: Copy
    offset: int


class PromptSender:
    """Sends this rank's copies of a ticket. `error` says why it stopped early, if it did."""

    def __init__(
        self, endpoint: KVEndpoint, spec: ModelSpec, source: Side, world_rank: int, send: KVSend, range_bytes: int = 1
    ) -> None:
        """`range_bytes`: see `RankConfig`. Raises `ValueError` where the ticket and its layout do not agree."""
        ticket = send.ticket
        destination = Side(Layout.parse(ticket.layout), ticket.page_tokens, ticket.dp_rank)
        own = next(held for held in holdings(spec, source) if held.world_rank == world_rank)
        self.ticket_id, self.sequence_id = ticket.ticket_id, send.sequence_id
        self.error: str | None = None
        self.blocks: list[int] = []
        """Pages of the sequence here."""
        self._endpoint, self._ownership, self._layers = endpoint, own.ownership, own.layers
        self._range_bytes, self._unsent = range_bytes, own.layers
        """Layers in which the step's tokens have not been sent."""
        self._readers = {reader.world_rank: reader for reader in ticket.readers}
        self._tables = {held.world_rank: PageTable(held.ownership, ticket.blocks) for held in holdings(spec, destination)}
        self._outgoing = list(
            _outgoing(handoff(spec, source, destination, range(ticket.first, ticket.tokens)), world_rank, endpoint)
        )
        self._peers: dict[int, Peer] = {}
        self._sent, self._tokens = ticket.first, ticket.tokens
        self._window = range(0)
        """Positions that the step under way computes and that are to be sent."""
        self._ends_s = time.monotonic() + send.lease_s
        self._cut_s = self._ends_s + send.grace_s
        self.is_cut = False
        """Whether writes were still under way when they had to have ended: their readers must be cut off."""
        self._under_way: list[Sending] = []
        self._num_bytes, self._busy_s, self._held_up_s = 0, 0.0, 0.0
        self._busy_since = self._computed_at = 0.0
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
        """Have them, by world rank, before the first step."""
        self._peers = peers

    def runs(self, tokens: int, new_blocks: list[int]) -> None:
        """A step begins, after which the first `tokens` tokens of the sequence are in this rank's pages: `new_blocks` too."""
        self.blocks += new_blocks
        self._unsent = self._layers
        self._window = range(self._sent, min(tokens, self._tokens))

    def ran(self, layers: range) -> None:
        """In `layers` they are by now: send them, with those before that were too few bytes for a write of their own."""
        parts = self._parts(range(self._unsent.start, layers.stop))
        is_last, num_bytes = layers.stop == self._layers.stop, sum(self._endpoint.num_bytes(part) for _, part in parts)
        if not parts or self.error is not None or (num_bytes < self._range_bytes and not is_last):
            return
        self._unsent = range(layers.stop, self._layers.stop)
        now = time.monotonic()
        if now > self._ends_s:
            self.stop("its lease is over")
            return
        self._busy_since, began = self._busy_since if self._under_way else now, time.thread_time()
        self._write(parts)
        self._held_up_s += time.thread_time() - began

    def computed(self) -> None:
        """The step is over."""
        if self._window and self.error is None:
            self._sent, self._computed_at = self._window.stop, time.monotonic()
        self._window = range(0)

    def stop(self, reason: str) -> None:
        """Begin no more writes."""
        self.error = self.error or reason

    def poll(self) -> KVSent | None:
        """How it ended, once nothing is under way and nothing more is to come."""
        self._under_way = [sending for sending in self._under_way if self._goes_on(sending)]
        if self._under_way and time.monotonic() > self._cut_s:
            self.stop(f"{len(self._under_way)} writes have not ended")
            self.is_cut = True
            for sending in self._under_way:
                sending.abandon()
            self._under_way = []
        if self._busy_since and not self._under_way:
            self._busy_s += time.monotonic() - self._busy_since
            self._busy_since = 0.0
        is_whole = self._sent == self._tokens
        if self._under_way or not (is_whole or self.error is not None):
            return None
        exposed_s = self._held_up_s + time.monotonic() - self._computed_at if is_whole and self._num_bytes else 0.0
        return KVSent(
            ticket_id=self.ticket_id,
            num_bytes=self._num_bytes,
            busy_s=self._busy_s,
            exposed_s=min(exposed_s, self._busy_s),
            error=self.error,
        )

    def _parts(self, layers: range) -> list[tuple[OutgoingCopy, Copy]]:
        """What the step computes of each copy in `layers`."""
        cut = [(outgoing, outgoing.copy.within(layers, self._window)) for outgoing in self._outgoing]
        return [(outgoing, part) for outgoing, part in cut if part is not None]

    def _write(self, parts: list[tuple[OutgoingCopy, Copy]]) -> None:
        try:
            for outgoing, part in parts:
                self._send(outgoing, part)
        except (TransferError, ValueError) as error:
            self.stop(str(error))

    def _goes_on(self, sending: Sending) -> bool:
        try:
            return not sending.is_done()
        except TransferError as error:
            self.stop(str(error))
            return False

    def _send(self, outgoing: OutgoingCopy, part: Copy) -> None:
        rank = part.destination
        staged_at = self._readers[rank].staged_at
        if staged_at is not None:
            staged_at += outgoing.offset + self._offset_of(part, outgoing.copy)
        table = PageTable(self._ownership, self.blocks)
        arguments = (self._peers[rank], self.ticket_id, part, table)
        try:
            sending = self._endpoint.send(*arguments, CopyTarget(staged_at=staged_at), self._tables[rank])
        except StagingFullError:  # the pages themselves are always there
            sending = self._endpoint.send(*arguments, CopyTarget(staged_at=None), self._tables[rank])
        self._under_way.append(sending)
        self._num_bytes += self._endpoint.num_bytes(part)

    def _offset_of(self, part: Copy, whole: Copy) -> int:
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
