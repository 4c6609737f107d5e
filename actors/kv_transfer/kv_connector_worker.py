"""The worker side of the KV connector: one rank's part in the hand-offs of prefill/decode disaggregation.

The worker acts on the transfers that step plans name, before and during the steps, and reports its progress.

plan ──expects──→ reserve the target of a transfer, publish where its bytes go ──→ KVReport.opened
       sends  ──→ connect to the readers of a ticket
       rows   ──→ step: after each range of layers, write the new KV of a ticket's sequence in these layers
       forgets ─→ start no further write for a ticket, and no longer expect its bytes
poll          ──→ completed writes, bytes that arrived                         ──→ KVReport.sent, KVReport.arrived
"""

from __future__ import annotations

import time
from functools import partial
from itertools import pairwise

from actors.kv_transfer.compatibility import Compatibility, IncompatiblePeerError
from actors.kv_transfer.endpoint import KVEndpoint, Peer
from actors.kv_transfer.prompt_sender import PromptSender
from actors.kv_transfer.queue_order import queue_order
from actors.kv_transfer.transport import TransferError, Transport
from actors.model.decoder import Decoder
from actors.model.kv.kv_caches import KVCaches
from actors.wire.kv import KVExpect, KVReader, KVReport, KVSend, KVSent
from actors.wire.plans import StepPlan
from actors.wire.rank_config import RankConfig
from placement.ownership.handoff import Copy, Side, holdings
from placement.ownership.handoff_pages import PageTable
from placement.ownership.handoff_positions import shared
from placement.ownership.rank_identity import RankIdentity

_HEARTBEAT_INTERVAL_S = 1.0


class KVConnectorWorker:
    """The KV connector of one rank. `side` is this rank's end of the hand-off, with its DP rank. Not thread-safe."""

    def __init__(self, config: RankConfig, side: Side, endpoint: KVEndpoint) -> None:
        self._endpoint, self._spec, self._rank = endpoint, config.spec, config.world_rank
        self._side = side
        self._held = next(held for held in holdings(config.spec, self._side) if held.world_rank == self._rank)
        self._ranges, self._range_bytes = _cut(self._held.layers, config.handoff_ranges), config.handoff_range_bytes
        self._order = queue_order(endpoint.device)
        self._senders: dict[str, PromptSender] = {}
        self._running: list[PromptSender] = []
        """Senders whose sequence has tokens in the current step."""
        self._peers: dict[bytes, Peer] = {}
        """Ranks that this rank is connected to and can write to, by agent metadata."""
        self._agent_metadata = endpoint.agent_metadata()
        self._report = KVReport(world_rank=self._rank)
        self._reported_s = 0.0

    @classmethod
    def of(
        cls,
        config: RankConfig,
        identity: RankIdentity,
        cache: KVCaches,
        transport: Transport,
        name: str,
        model_digest: str,
    ) -> KVConnectorWorker:
        """Returns the KV connector of the rank that `config` and `identity` describe. Registers the pages of `cache` with
        `transport`; `name` is the name and version of the transport, and `model_digest` identifies the model in the handshake
        with peers.

        Raises `ModelError` for a model whose KV cannot be handed off, and `ValueError` for pages that the transport cannot
        register.
        """
        held = next(each for each in holdings(config.spec, identity.side) if each.world_rank == config.world_rank)
        compatibility = Compatibility.of(config.spec, model_digest, config.dtype, name)
        return cls(config, identity.side, KVEndpoint(transport, cache.parts[0], held, compatibility))

    @property
    def is_busy(self) -> bool:
        """Whether a copy is being sent or is expected, so that `poll` must be called."""
        return bool(self._senders) or self._endpoint.num_expected > 0

    def watch(self, decoder: Decoder) -> None:
        """Observe `decoder`, so that the KV of each range of layers is sent as soon as that range has run. Called once, before
        the first step."""
        decoder.watch(self._ranges, self._ran)

    def before(self, plan: StepPlan) -> None:
        """Perform what `plan` requests of this rank's DP rank before its step: expect copies, connect to the readers of sends,
        and drop forgotten tickets. A send that cannot begin is reported by `poll`, not raised."""
        dp_rank = self._side.dp_rank
        for expect in plan.expects:
            if expect.dp_rank == dp_rank:
                self._expect(expect)
        for send in plan.sends:
            if send.dp_rank == dp_rank:
                self._begin(send)
        for ticket_id in plan.forgets:
            self._endpoint.forget(ticket_id)
            if ticket_id in self._senders:
                self._senders[ticket_id].stop("it was given up")
        self._meet(plan)

    def after(self) -> None:
        """Finish the step: start all writes that are still queued, and mark the positions that the step computed as sent."""
        self._order.flush()
        for sender in self._running:
            sender.computed()
        self._running = []

    def poll(self) -> KVReport | None:
        """Returns the progress since the last report, or None if there is none. Does not wait for writes or peers.

        While a ticket is being sent, a report is returned at least once a second, even an empty one, as a heartbeat.
        Disconnects the readers of failed tickets.
        """
        if self._endpoint.num_expected:
            self._report.arrived.extend(self._endpoint.poll())
        for sender in list(self._senders.values()):
            sent = sender.poll()
            if sent is not None:
                self._done(sender, sent)
        found = self._report
        is_due = bool(self._senders) and time.monotonic() >= self._reported_s + _HEARTBEAT_INTERVAL_S
        if not (found.opened or found.arrived or found.sent or is_due):
            return None
        self._reported_s = time.monotonic()
        self._report = KVReport(world_rank=self._rank)
        return found

    def close(self) -> None:
        """Close the endpoint and its transport. No write may be in progress."""
        self._endpoint.close()

    def _meet(self, plan: StepPlan) -> None:
        """Record which senders have tokens in the step, and the pages that these tokens are written to."""
        by_sequence = {sender.sequence_id: sender for sender in self._senders.values()}
        for row in plan.rows if by_sequence else []:
            sender = by_sequence.get(row.sequence_id)
            if sender is not None:
                sender.runs(row.start + row.count, row.new_blocks)
                self._running.append(sender)

    def _ran(self, layers: range) -> None:
        if self._running:
            self._order.put(partial(self._send, layers))

    def _send(self, layers: range) -> None:
        for sender in self._running:
            sender.ran(layers)

    def _expect(self, expect: KVExpect) -> None:
        need = self._need(range(expect.first, expect.tokens))
        table = PageTable(self._held.ownership, expect.blocks)
        target = self._endpoint.expect(expect.ticket_id, need, table)
        reader = KVReader(world_rank=self._rank, agent_metadata=self._agent_metadata, staged_at=target.staged_at)
        self._report.opened[expect.ticket_id] = reader
        if not self._endpoint.num_bytes(need):
            self._endpoint.forget(expect.ticket_id)
            self._report.arrived.append(expect.ticket_id)

    def _need(self, window: range) -> Copy:
        """Returns everything that this rank holds of the positions of `window`, regardless of which rank sends it."""
        held = self._held
        return Copy(-1, self._rank, held.layers, held.kv_heads, shared(held.ownership, held.ownership, window))

    def _begin(self, send: KVSend) -> None:
        ticket_id = send.ticket.ticket_id
        try:
            sender = PromptSender(self._endpoint, self._spec, self._side, self._rank, send, self._range_bytes)
            sender.connected({rank: self._peer(agent_metadata) for rank, agent_metadata in sender.reader_metadata.items()})
            self._senders[ticket_id] = sender
        except (TransferError, IncompatiblePeerError, ValueError) as error:
            self._report.sent.append(KVSent(ticket_id=ticket_id, error=str(error)))

    def _peer(self, agent_metadata: bytes) -> Peer:
        if agent_metadata not in self._peers:
            self._peers[agent_metadata] = self._endpoint.connect(agent_metadata)
        return self._peers[agent_metadata]

    def _done(self, sender: PromptSender, sent: KVSent) -> None:
        del self._senders[sender.ticket_id]
        self._report.sent.append(sent)
        if sent.error is not None:
            self._forget_peers(sender)

    def _forget_peers(self, sender: PromptSender) -> None:
        """Disconnect the readers of a failed transfer, so that the next transfer connects to them again.

        A reader that another transfer is still writing to stays connected, unless a write did not end in time
        (`PromptSender.is_cut`): disconnecting is the only way to end that write, and also ends other writes to the reader.
        """
        busy = {agent_metadata for other in self._senders.values() for agent_metadata in other.reader_metadata.values()}
        for agent_metadata in sender.reader_metadata.values():
            if agent_metadata in self._peers and (sender.is_cut or agent_metadata not in busy):
                self._endpoint.disconnect(self._peers.pop(agent_metadata))


class NoKVConnectorWorker:
    """The KV connector of a rank that takes part in no hand-offs, because there are no prefill and decode pools."""

    is_busy = False

    def watch(self, decoder: Decoder) -> None:
        """See `KVConnectorWorker.watch`. Does nothing."""

    def before(self, plan: StepPlan) -> None:
        """See `KVConnectorWorker.before`. Does nothing."""

    def after(self) -> None:
        """See `KVConnectorWorker.after`. Does nothing."""

    def poll(self) -> KVReport | None:
        """See `KVConnectorWorker.poll`. Returns None."""
        return None

    def close(self) -> None:
        """See `KVConnectorWorker.close`. Does nothing."""


def _cut(layers: range, count: int) -> list[range]:
    """Split `layers` into at most `count` contiguous ranges, in order, whose lengths differ by at most one."""
    parts = min(count, len(layers))
    ends = [layers.start + at * len(layers) // parts for at in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(ends)]
