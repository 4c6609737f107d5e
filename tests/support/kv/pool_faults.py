"""Faults of hand-offs for tests: what can go wrong where, and which states of both books each met."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgpack

from actors.engine.admission import EngineBusy
from actors.engine.disaggregation import decode_transfers, prefill_transfers
from actors.engine.disaggregation.decode_transfers import DecodeTransfer
from actors.engine.disaggregation.kv_connector import TransferChanges
from actors.engine.disaggregation.prefill_transfers import PrefillTransfer
from actors.engine.loop import StepLoop
from actors.engine.sequences.sequence import Sequence
from actors.kv_transfer.local import LocalTransfer, LocalTransport, Switchboard
from actors.kv_transfer.transport import Ranges, TransferError
from actors.wire.kv import KVReader, KVReport, KVTicket
from actors.wire.requests import GenerateRequest, TokenEvent
from tests.support.kv.pools import Lost, Pools

FAULTS = (
    "none",
    "refused",
    "lost before it was asked",
    "lost after it was asked",
    "lost after the first token",
    "an event comes twice",
    "an error comes before the ticket is out",
    "an error comes late",
    "cancelled at once",
    "cancelled before the ticket is out",
    "cancelled at the ticket",
    "cancelled twice at the ticket",
    "cancelled at the ticket, then an error",
    "cancelled at the first token",
    "cancelled at the second token",
    "prefill cancelled at once",
    "prefill cancelled while it computes",
    "prefill cancelled at the first token",
    "prefill cancelled twice while a write hangs",
    "prefill cancelled when all was sent",
    "a write cannot be begun",
    "a write is lost",
    "a write never ends",
    "agent metadata of another model",
    "a short deadline",
)
CANCELLED = tuple(fault for fault in FAULTS if fault.startswith("cancelled"))

Hit = tuple[str, str, str]
"""Which book, the state in it, and whose fault met it: ``decode`` wants the tokens, ``prefill`` computes the prompt."""

STATES: set[Hit] = {
    (book, state.name, side)
    for book, states in (
        ("decode transfer", decode_transfers.DecodeTransferState),
        ("prefill transfer", prefill_transfers.PrefillTransferState),
    )
    for state in states
    for side in ("decode", "prefill")
}


class Stuck:
    """A write that never ends."""

    def is_done(self) -> bool:
        return False


class Torn:
    """A write that breaks off."""

    def is_done(self) -> bool:
        raise TransferError("it broke off")


class FaultyTransport(LocalTransport):
    """Writes as the fault in a ticket's name wants it, on its way from the prefill side."""

    def __init__(self, board: Switchboard, name: str) -> None:
        super().__init__(board, name)

    def write(self, peer: str, ranges: Ranges, tag: bytes) -> LocalTransfer | Stuck | Torn:
        fault = fault_of(msgpack.unpackb(tag)["name"])
        if fault == "a write cannot be begun":
            raise TransferError("it cannot be begun")
        if fault == "a write is lost":
            return Torn()
        hangs = fault in ("a write never ends", "prefill cancelled twice while a write hangs")
        return Stuck() if hangs else super().write(peer, ranges, tag)


def fault_of(name: str) -> str:
    """Requests are called ``7:fault``, tickets ``7:fault~7``."""
    return name.split(":")[1].split("~")[0]


class Injector:
    """Stands between the two sides, and counts in `hits` which states faults met when a book heard of them."""

    def __init__(self, both: Pools) -> None:
        self.hits = Counter[Hit]()
        self._decode, self._prefill = both.decode.engine, both.prefill.engine
        self._tokens, self._tickets = Counter[str](), dict[str, str]()
        self._made, self._out = dict[str, DecodeTransfer](), dict[str, PrefillTransfer]()
        both.on_prefill_request, both.on_prefill_event, both.on_decode_event = (
            self.on_prefill_request,
            self.on_prefill_event,
            self.on_decode_event,
        )
        self._watch_decode(both.decode.engine._loop)
        self._watch_prefill(both.prefill.engine._loop)
        self._submit, self._prefill.submit = self._prefill.submit, self.submit

    def on_decode_event(self, event: TokenEvent) -> None:
        name, fault, cancel = event.request_id, fault_of(event.request_id), self._decode.cancel
        self._tokens[name] += len(event.tokens)
        if event.ticket is not None:
            self._tickets[name] = event.ticket.ticket_id
            if fault.startswith(("cancelled at the ticket", "cancelled twice at the ticket")):
                cancel(name)
            if fault == "cancelled twice at the ticket":
                cancel(name)
        places = {"cancelled at the first token": 1, "cancelled at the second token": 2}
        if event.tokens and self._tokens[name] == places.get(fault):
            cancel(name)
        if fault == "an error comes late" and self._tokens[name] == 2 and name in self._tickets:
            self._decode.on_ticket_event(_error(self._tickets[name]))

    def on_prefill_request(self, request: GenerateRequest) -> None:
        fault = fault_of(request.request_id)
        if fault == "refused":
            raise EngineBusy("requests", 5, 5)
        if fault == "lost before it was asked":
            raise Lost("it died")

    def on_prefill_event(self, event: TokenEvent) -> TokenEvent | None:
        name, fault = event.request_id, fault_of(event.request_id)
        if fault == "lost after it was asked" or (fault == "lost after the first token" and event.finish):
            return None
        if fault == "cancelled at the ticket, then an error":
            return _error(name) if event.tokens else None
        if fault == "an event comes twice":
            self._decode.on_ticket_event(event)
            if event.finish:
                self._note("prefill transfer", self._out.get(name), "prefill")
        if event.tokens and fault in ("prefill cancelled at the first token", "prefill cancelled twice while a write hangs"):
            self._prefill.cancel(name)
            if "twice" in fault:
                self._prefill.cancel(name)
        if event.finish and fault == "prefill cancelled when all was sent":
            self._prefill.cancel(name)
        return event

    def submit(self, item: GenerateRequest, deliver: Callable[[TokenEvent], None]) -> None:
        """The prefill engine's, to which some tickets come as from ranks of another model."""
        fault, ticket = fault_of(item.request_id), item.ticket
        if ticket is not None and fault == "agent metadata of another model":
            readers = [
                KVReader(world_rank=each.world_rank, agent_metadata=_other(each.agent_metadata)) for each in ticket.readers
            ]
            item = item.model_copy(update={"ticket": ticket.model_copy(update={"readers": readers})})
        self._submit(item, deliver)
        if ticket is not None and fault == "prefill cancelled at once":
            self._prefill.cancel(item.request_id)

    def _watch_decode(self, loop: StepLoop) -> None:
        scheduler, handoffs, book = loop._scheduler, loop._handoffs, loop._handoffs.decode_transfers
        reserve, expired, cancel, on_ticket_event = book.reserve, book.expired, scheduler.cancel, handoffs.on_remote_event
        seen = Counter[str]()

        def reserved(sequence: Sequence, now: float) -> None:
            reserve(sequence, now)
            made, name = book.of(sequence), sequence.request.request_id
            self._made[name] = self._made[made.ticket_id] = made
            if fault_of(name) == "cancelled before the ticket is out":
                self._decode.cancel(name)
            if fault_of(name) == "an error comes before the ticket is out":
                self._decode.on_ticket_event(_error(made.ticket_id))

        def late(now: float) -> list[DecodeTransfer]:
            found = expired(now)
            for made in found:
                self._note("decode transfer", made, "prefill")
            return found

        def cancelled(name: str) -> list[TokenEvent]:
            self._note("decode transfer", self._made.get(name), "decode")
            return cancel(name)

        def taken(event: TokenEvent, now: float) -> TransferChanges:
            seen[repr(event)] += not event.is_empty
            if event.finish not in (None, "handoff") or seen[repr(event)] > 1:
                self._note("decode transfer", self._made.get(event.request_id), "prefill")
            return on_ticket_event(event, now)

        _replace(book, reserve=reserved, expired=late)
        _replace(scheduler, cancel=cancelled)
        _replace(handoffs, on_remote_event=taken)

    def _watch_prefill(self, loop: StepLoop) -> None:
        scheduler, book = loop._scheduler, loop._handoffs.prefill_transfers
        begin, on_report, cancel = book.begin, book.on_report, scheduler.cancel

        def begun(sequence: Sequence, ticket: KVTicket, now: float) -> None:
            begin(sequence, ticket, now)
            self._out[ticket.ticket_id] = book._open[ticket.ticket_id]
            if fault_of(ticket.ticket_id) == "prefill cancelled while it computes":
                self._prefill.cancel(ticket.ticket_id)

        def reported(report: KVReport, now: float) -> Any:
            for sent in report.sent:
                if sent.error is not None:
                    self._note("prefill transfer", self._out.get(sent.ticket_id), "prefill")
            return on_report(report, now)

        def cancelled(name: str) -> list[TokenEvent]:
            self._note("prefill transfer", self._out.get(name), "decode")
            return cancel(name)

        _replace(book, begin=begun, on_report=reported)
        _replace(scheduler, cancel=cancelled)

    def _note(self, book: str, found: DecodeTransfer | PrefillTransfer | None, side: str) -> None:
        if found is not None:
            self.hits[book, found.state.name, side] += 1


def _replace(owner: object, **methods: object) -> None:
    for name, method in methods.items():
        setattr(owner, name, method)


def _error(ticket_id: str) -> TokenEvent:
    return TokenEvent(request_id=ticket_id, finish="error", error="it died")


def _other(agent_metadata: bytes) -> bytes:
    unpacked = msgpack.unpackb(agent_metadata)
    unpacked["compatibility"]["model_digest"] = "b" * 64
    return msgpack.packb(unpacked)
