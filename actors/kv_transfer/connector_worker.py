"""A rank's part in hand-offs: it does what plans ask for between and within steps, and tells how far it is.

plan ──expects──→ be ready, and say where the bytes go     ──→ KVReport.opened
       rows   ──→ step: after each range of layers, write what is new of a ticket's sequence in them
       forgets ─→ begin no more, expect no more
poll          ──→ writes that are done, bytes that arrived ──→ KVReport.sent, KVReport.arrived
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
    """One rank's. `side` is its own, with its DP rank. Not safe for several threads."""

    def __init__(self, config: RankConfig, side: Side, endpoint: KVEndpoint) -> None:
        self._endpoint, self._spec, self._rank = endpoint, config.spec, config.world_rank
        self._side = side
        self._held = next(held for held in holdings(config.spec, self._side) if held.world_rank == self._rank)
        self._ranges, self._range_bytes = _cut(self._held.layers, config.handoff_ranges), config.handoff_range_bytes
        self._order = queue_order(endpoint.device)
        self._senders: dict[str, PromptSender] = {}
        self._running: list[PromptSender] = []
        """Those with tokens in the step under way."""
        self._peers: dict[bytes, Peer] = {}
        """Ranks this one can write to, by their agent metadata."""
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
        """That of the rank of `config`. `name`: the transport's, with its version.

        Raises `ModelError` for a model whose KV cannot be handed off.
        """
        held = next(each for each in holdings(config.spec, identity.side) if each.world_rank == config.world_rank)
        compatibility = Compatibility.of(config.spec, model_digest, config.dtype, name)
        return cls(config, identity.side, KVEndpoint(transport, cache.parts[0], held, compatibility))

    @property
    def is_busy(self) -> bool:
        """Whether to poll."""
        return bool(self._senders) or self._endpoint.num_expected > 0

    def watch(self, decoder: Decoder) -> None:
        """Send what `decoder` computes, range by range of its layers."""
        decoder.watch(self._ranges, self._ran)

    def before(self, plan: StepPlan) -> None:
        """What a plan asks for before its step."""
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
        """The step is over: what it computed has been sent."""
        self._order.flush()
        for sender in self._running:
            sender.computed()
        self._running = []

    def poll(self) -> KVReport | None:
        """What has happened since the last call, if anything has; while writes are under way, once a second at least: a
        heartbeat. Never waits."""
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
        """Give the pools back."""
        self._endpoint.close()

    def _meet(self, plan: StepPlan) -> None:
        """Know whose tokens the step runs, and in which pages they will be."""
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
        """All that this rank keeps of some positions, whoever sends it."""
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
        """A write may have failed: whoever it was for is connected to anew next time, if nothing else is under way to it. One
        that did not end in time is ended so, and with it whatever else is."""
        busy = {agent_metadata for other in self._senders.values() for agent_metadata in other.reader_metadata.values()}
        for agent_metadata in sender.reader_metadata.values():
            if agent_metadata in self._peers and (sender.is_cut or agent_metadata not in busy):
                self._endpoint.disconnect(self._peers.pop(agent_metadata))


class NoKVConnectorWorker:
    """That of a rank of no pool."""

    is_busy = False

    def watch(self, decoder: Decoder) -> None:
        """Nothing is sent."""

    def before(self, plan: StepPlan) -> None:
        """Nothing is asked for."""

    def after(self) -> None:
        """Nothing is sent."""

    def poll(self) -> KVReport | None:
        """Nothing happens."""
        return None

    def close(self) -> None:
        """There is nothing to give back."""


def _cut(layers: range, count: int) -> list[range]:
    """At most `count` ranges of layers, in order, as even as can be."""
    parts = min(count, len(layers))
    ends = [layers.start + at * len(layers) // parts for at in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(ends)]
