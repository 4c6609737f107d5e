"""The KV connector of an engine with pools or KV tiers: prefill/decode disaggregation and KV offload.

It combines decode-side transfers, prefill-side transfers and the KV offload manager, each with its own states. The scheduler
uses it through `SchedulerKVConnector`. The loop passes the reports of ranks and of the other pool to it, and the resulting
`TransferChanges` to the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable

from actors.engine.batching.dp_rank import DPRank
from actors.engine.config.engine_config import EngineConfig
from actors.engine.config.stats import HandoffStats
from actors.engine.disaggregation.decode_transfers import DecodeTransfer, DecodeTransfers
from actors.engine.disaggregation.kv_connector import TransferChanges
from actors.engine.disaggregation.offload_manager import KVOffloadManager
from actors.engine.disaggregation.prefill_transfers import PrefillTransfers
from actors.engine.sequences.sequence import Sequence, State
from actors.wire.kv import KVReport
from actors.wire.requests import TokenEvent

_WRITES_NO_MORE = ("handoff", "abort", "deadline")
"""Finish reasons of a prefill engine that imply that its ranks have stopped writing; an ``error`` does not imply it."""


class EngineKVConnector:
    """The `SchedulerKVConnector` of an engine with a pool or tiers. Not thread-safe: the engine's thread calls it."""

    def __init__(self, config: EngineConfig, dp_ranks: list[DPRank]) -> None:
        self.decode_transfers = DecodeTransfers(config, dp_ranks)
        self.prefill_transfers = PrefillTransfers(config, dp_ranks)
        self.offload = KVOffloadManager(config, dp_ranks)
        self._dp_ranks, self._in_pool = dp_ranks, config.disaggregation is not None

    def __bool__(self) -> bool:
        """Whether any transfer is under way, so that the loop must run even without plans in flight."""
        return bool(self.decode_transfers) or bool(self.prefill_transfers) or bool(self.offload)

    def load(self, sequence: Sequence, now: float) -> bool:
        """See `SchedulerKVConnector.load`. The KV tiers are tried first, then the prefill side."""
        promised = self.offload.num_matched_blocks(sequence)
        if promised:
            self.offload.fetch(sequence, promised, now)
        return bool(promised) or self._start_handoff(sequence, now)

    def _start_handoff(self, sequence: Sequence, now: float) -> bool:
        """Reserve blocks for the rest of a prompt if it is worth handing off to the prefill side. Returns whether it is.

        This is tried only once for a sequence: after a preemption this engine computes the prompt itself.
        """
        is_worth, sequence.reserves = self.decode_transfers.is_worth(sequence), False
        if is_worth:
            self.decode_transfers.reserve(sequence, now)
        return is_worth

    def loaded(self, dp_rank: int, now: float) -> list[Sequence]:
        """See `SchedulerKVConnector.loaded`.

        If the tiers have filled only a part, the rest of the prompt may be handed off to the prefill side first.
        """
        fetched = self.offload.ready(dp_rank)
        for sequence in fetched:
            self.save(sequence, self._dp_ranks[dp_rank].register(sequence))
        found = [sequence for sequence in fetched if not self._start_handoff(sequence, now)]
        received = self.decode_transfers.ready(dp_rank)
        for sequence in received:
            sequence.num_planned = sequence.num_computed = sequence.prompt_length
            self.save(sequence, self._dp_ranks[dp_rank].register(sequence))
        return found + received

    def started(self, sequence: Sequence, now: float) -> None:
        """See `SchedulerKVConnector.started`."""
        if sequence.request.ticket is not None:
            self.prefill_transfers.begin(sequence, sequence.request.ticket, now)

    def save(self, sequence: Sequence, places: range) -> None:
        """See `SchedulerKVConnector.save`."""
        self.offload.save(sequence, places)

    def finish(self, sequence: Sequence, last: TokenEvent) -> list[TokenEvent]:
        """See `SchedulerKVConnector.finish`. Also ends the wait of a sequence for blocks that are being filled."""
        if sequence.state is State.RESERVED and not self.offload.abandon(sequence):
            self.decode_transfers.abandon(self.decode_transfers.of(sequence))
        if sequence.request.ticket is None or sequence.state is not State.RUNNING:
            return [last]
        if last.finish == "handoff":
            return [last.model_copy(update={"finish": None}), *_some(self.prefill_transfers.computed(last.request_id))]
        writes_no_more = last.finish in _WRITES_NO_MORE
        return self.stop(last if writes_no_more else last.model_copy(update={"finish": "abort"}))

    def stop(self, last: TokenEvent) -> list[TokenEvent]:
        """Stop sending the prompt whose ticket id is `last.request_id`, and end it with the event `last` once no rank writes.

        Returns `last` if that is so already; otherwise an empty list, and `on_report` returns it later. Does nothing if the
        prompt is not being sent.
        """
        return _some(self.prefill_transfers.stop(last.request_id, last))

    def plan_fields(self) -> dict[str, object]:
        """See `SchedulerKVConnector.plan_fields`."""
        decode, prefill, offload = self.decode_transfers, self.prefill_transfers, self.offload
        updates = {"expects": decode.expects, "sends": prefill.sends, "forgets": decode.forgets + prefill.forgets}
        updates |= {"saves": offload.saves, "fetches": offload.fetches}
        decode.expects, decode.forgets, prefill.sends, prefill.forgets = [], [], [], []
        offload.saves, offload.fetches = [], []
        return {name: orders for name, orders in updates.items() if orders}

    def poll(self, tickets: Iterable[str], now: float) -> TransferChanges:
        """Give up late transfers. Returns their sequences (`failed`), which this engine must compute itself, and the heartbeats
        now due (`events`).

        `tickets` holds the ids of the tickets whose prompts this engine has not computed yet. `now` is in seconds on the
        engine's clock. Call this between two steps, or while none is in flight.
        """
        late = self.decode_transfers.expired(now)
        for transfer in late:
            self._fall_back(transfer)
        failed = [transfer.sequence for transfer in late] + self.offload.expired(now)
        return TransferChanges(events=self.prefill_transfers.heartbeats(tickets, now) if self._in_pool else (), failed=failed)

    def on_report(self, report: KVReport, now: float) -> TransferChanges:
        """Handle a rank's report on its KV transfers at `now`, in seconds on the engine's clock. Returns the changes that
        follow, which the caller must pass to `Scheduler.apply`."""
        self.offload.on_report(report)
        last, dropped = self.prefill_transfers.on_report(report, now)
        return TransferChanges(events=self.decode_transfers.on_report(report, now) + last, dropped=dropped)

    def on_remote_event(self, event: TokenEvent, now: float) -> TransferChanges:
        """Handle an event whose request id is a ticket of this engine, from the prefill side or from the router that should
        have reached it.

        The event is a heartbeat, the first token, or the end. If the prefill side failed, this engine computes the prompt
        itself. Returns the changes for `Scheduler.apply`; none for a ticket that is done. `now` is in seconds on the engine's
        clock.
        """
        transfer = self.decode_transfers.get(event.request_id)
        if transfer is None:
            return TransferChanges()
        self.decode_transfers.on_heartbeat(transfer, event.finish == "handoff", now)
        changes = TransferChanges()
        if transfer.is_live and event.finish not in (None, "handoff"):
            self._fall_back(transfer)
            changes = TransferChanges(failed=[transfer.sequence])
        elif transfer.is_live and event.tokens and not transfer.is_committed:
            transfer.is_committed = True
            changes = TransferChanges(first_tokens=[(transfer.sequence, event)])
        if event.finish in _WRITES_NO_MORE or event.refused is not None:
            self.decode_transfers.close(transfer)
        return changes

    def on_result(self, now: float) -> None:
        """Record that the result of a step arrived at `now` (seconds on the engine's clock), which shows that all ranks are
        alive."""
        self.prefill_transfers.ran(now)

    def _fall_back(self, transfer: DecodeTransfer) -> None:
        """Abandon a transfer whose blocks will not be filled, so that this engine computes the prompt."""
        self.decode_transfers.abandon(transfer)
        self.decode_transfers.counts.fallen_back += 1

    def stats(self) -> HandoffStats:
        """Return the statistics of decode-side and prefill-side transfers since the ranks started."""
        decode, prefill = self.decode_transfers.counts, self.prefill_transfers.counts
        reserved = sum(transfer.is_live for transfer in self.decode_transfers)
        return HandoffStats(
            reserved=reserved,
            draining=len(self.decode_transfers) - reserved,
            sending=len(self.prefill_transfers),
            reservations=decode.made,
            reservation_wait_s=decode.wait_s,
            received=decode.completed,
            fallen_back=decode.fallen_back,
            outlived=decode.outlived,
            sent=prefill.completed,
            failed=prefill.failed,
            sent_bytes=prefill.num_bytes,
            transfer_s=prefill.busy_s,
            exposed_s=prefill.exposed_s,
            overlap=prefill.overlap,
        )


def _some(event: TokenEvent | None) -> list[TokenEvent]:
    return [] if event is None else [event]
