"""The sender of one prompt's KV cache: it writes each prefill chunk by ranges of layers, overlapped with compute.

step      chunk 0, layers 0-7 8-15 16-23 24-29   chunk 1, layers 0-7 8-15 16-23 24-29
writes                     └────┐└───┐└────┐└────┐               └────┐└───┐└────┐└────┐
          ────────────────────────────────────────────────────────────────────────→ exposed time: after the last range of
                                                                  the last chunk, no compute is left to overlap with
"""

from __future__ import annotations

import time

from actors.kv_transfer.endpoint import KVEndpoint, Peer, Sending
from actors.kv_transfer.outgoing_copies import OutgoingCopies, OutgoingPart
from actors.kv_transfer.transport import TransferError
from actors.wire.kv import KVSend, KVSent
from placement.model.spec import ModelSpec
from placement.ownership.handoff import Side


class PromptSender:
    """Sends this rank's copies for one ticket. `error` is the reason why it stopped early, or None."""

    def __init__(
        self, endpoint: KVEndpoint, spec: ModelSpec, source: Side, world_rank: int, send: KVSend, range_bytes: int = 1
    ) -> None:
        """`range_bytes` is the least size of a write, see `RankConfig`. Raises `ValueError` if the ticket does not match its
        layout."""
        ticket = send.ticket
        self.ticket_id, self.sequence_id = ticket.ticket_id, send.sequence_id
        self.error: str | None = None
        self.is_cut = False
        """Whether writes were still in progress after the grace period, so that their readers must be disconnected."""
        self._outgoing, self._writes = OutgoingCopies(endpoint, spec, source, world_rank, ticket), _Writes()
        self._progress = _Progress(self._outgoing.layers, ticket.first, ticket.tokens)
        self._range_bytes = range_bytes
        self._blocks: list[int] = []
        """Pages of the sequence on this rank."""
        self._ends_s = time.monotonic() + send.lease_s
        self._cut_s = self._ends_s + send.grace_s
        self._held_up_s = 0.0
        """CPU seconds that the compute thread spent on beginning writes."""
        self._computed_at = 0.0
        """End of the last step that computed something to send, on the monotonic clock."""

    @property
    def reader_metadata(self) -> dict[int, bytes]:
        """Agent metadata of the ranks that this rank writes to, by world rank."""
        return self._outgoing.reader_metadata

    def connected(self, peers: dict[int, Peer]) -> None:
        """Set the connected peers, by the world rank of the reader. Must be called before the first step."""
        self._outgoing.connected(peers)

    def runs(self, tokens: int, new_blocks: list[int]) -> None:
        """Begin a step, after which the first `tokens` tokens of the sequence are computed. `new_blocks` are the entries that
        the step adds to the sequence's block table (`Row.new_blocks`)."""
        self._blocks += new_blocks
        self._progress.begin_step(tokens)

    def ran(self, layers: range) -> None:
        """Send the step's positions in `layers`, which have just run, together with earlier layers that have not been sent.

        Layers are held back until their parts reach `range_bytes` together; those of the last range are always sent. A write
        that cannot begin, or a lease that is over, stops the sender and is not raised.
        """
        ready = self._progress.ready(layers)
        parts, is_last = self._outgoing.parts(ready, self._progress.window), ready.stop == self._outgoing.layers.stop
        too_few = sum(part.num_bytes for part in parts) < self._range_bytes and not is_last
        if not parts or too_few or self.error is not None:
            return
        self._progress.sent(ready)
        if time.monotonic() > self._ends_s:
            self.stop("its lease is over")
            return
        began = time.thread_time()
        self._write(parts)
        self._held_up_s += time.thread_time() - began

    def computed(self) -> None:
        """End the step, whose positions have been sent in all layers unless the sender was stopped."""
        if self._progress.window and self.error is None:
            self._computed_at = time.monotonic()
            self._progress.step_sent()
        self._progress.end_step()

    def stop(self, reason: str) -> None:
        """Start no further write; writes in progress continue. `reason` becomes the error, unless there is one already."""
        self.error = self.error or reason

    def poll(self) -> KVSent | None:
        """Returns the result once no write is in progress and none will follow, else None. Does not wait for writes.

        Writes that have not ended when the lease and the grace time are over are given up; `is_cut` is then true.
        """
        for error in self._writes.poll():
            self.stop(error)
        if self._writes and time.monotonic() > self._cut_s:
            self.stop(f"{len(self._writes)} writes have not ended")
            self.is_cut = True
            self._writes.abandon()
        is_over = self._progress.is_whole or self.error is not None
        return self._result() if is_over and not self._writes else None

    def _result(self) -> KVSent:
        writes, exposed_s = self._writes, 0.0
        if self._progress.is_whole and writes.num_bytes:
            exposed_s = self._held_up_s + time.monotonic() - self._computed_at
        return KVSent(
            ticket_id=self.ticket_id,
            num_bytes=writes.num_bytes,
            busy_s=writes.busy_s,
            exposed_s=min(exposed_s, writes.busy_s),
            error=self.error,
        )

    def _write(self, parts: list[OutgoingPart]) -> None:
        self._writes.start_clock()
        try:
            for part in parts:
                self._writes.add(self._outgoing.send(part, self._blocks), part.num_bytes)
        except (TransferError, ValueError) as error:
            self.stop(str(error))


class _Progress:
    """How much of the tokens ``[first, tokens)`` of a sequence has been sent, and in how many layers in the current step."""

    def __init__(self, layers: range, first: int, tokens: int) -> None:
        self._layers, self._tokens = layers, tokens
        self._done = first
        """The first token that has not been sent in every layer."""
        self.window = range(0)
        """Positions to send that the current step computes."""
        self._unsent = layers
        """Layers in which the positions of the window have not been sent."""

    @property
    def is_whole(self) -> bool:
        """Whether all tokens have been sent in every layer."""
        return self._done == self._tokens

    def begin_step(self, tokens: int) -> None:
        """Begin a step, after which the first `tokens` tokens are computed."""
        self.window, self._unsent = range(self._done, min(tokens, self._tokens)), self._layers

    def ready(self, layers: range) -> range:
        """Returns the layers that can be sent once `layers` have run, which include earlier layers that have not been sent."""
        return range(self._unsent.start, layers.stop)

    def sent(self, layers: range) -> None:
        """Mark everything up to the last of `layers` as sent, or as never to be sent."""
        self._unsent = range(layers.stop, self._layers.stop)

    def step_sent(self) -> None:
        """Mark the positions of the window as sent in all layers."""
        self._done = self.window.stop

    def end_step(self) -> None:
        """End the step: no positions are left to send until the next one begins."""
        self.window = range(0)


class _Writes:
    """The writes of a ticket that are in progress, and the bytes and seconds of all of its writes."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.busy_s = 0.0
        """Seconds during which at least one write was in progress."""
        self._under_way: list[Sending] = []
        self._busy_since: float | None = None

    def __len__(self) -> int:
        return len(self._under_way)

    def start_clock(self) -> None:
        """Start measuring the busy time, unless writes are in progress already. Called before writes begin."""
        if not self._under_way:
            self._busy_since = time.monotonic()

    def add(self, sending: Sending, num_bytes: int) -> None:
        """Add a write of `num_bytes` that has begun."""
        self._under_way.append(sending)
        self.num_bytes += num_bytes

    def poll(self) -> list[str]:
        """Drop the writes that have ended. Returns the errors of those that failed."""
        unfinished, errors = list[Sending](), list[str]()
        for sending in self._under_way:
            try:
                if not sending.is_done():
                    unfinished.append(sending)
            except TransferError as error:
                errors.append(str(error))
        self._set(unfinished)
        return errors

    def abandon(self) -> None:
        """Give up all writes in progress, and release their staging runs. Their peers must be disconnected."""
        for sending in self._under_way:
            sending.abandon()
        self._set([])

    def _set(self, under_way: list[Sending]) -> None:
        self._under_way = under_way
        if self._busy_since is not None and not under_way:
            self.busy_s += time.monotonic() - self._busy_since
            self._busy_since = None
