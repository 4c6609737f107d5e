"""A prefill and a decode replica in one process, with unlike layouts, and an ingress that goes between them.

Real engines, ranks and KV connectors; bytes go over `actors.kv_transfer.local`.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from actors.engine.admission import RequestRefused
from actors.engine.config.engine_config import DisaggregationConfig, EngineConfig
from actors.kv_offload.offload_worker import KVOffloadWorker
from actors.kv_transfer.kv_connector_worker import KVConnectorWorker
from actors.kv_transfer.local import LocalTransport, Switchboard
from actors.kv_transfer.transport import Transport
from actors.rank.assembly import Parts
from actors.wire.kv import KVTicket
from actors.wire.requests import GenerateRequest, TokenEvent
from placement.layout.layout import Layout
from tests.support.inprocess import InProcess, in_process
from tests.support.models.tiny_models import TinyModel

_WAIT_S = 60.0


@dataclass
class Pools:
    """Two replicas. `on_prefill_request`, `on_prefill_event` and `on_decode_event` may change what passes between them, or act
    on it: a fault to be injected."""

    prefill: InProcess
    decode: InProcess
    board: Switchboard
    tickets: list[KVTicket] = field(default_factory=list)
    on_prefill_request: Callable[[GenerateRequest], None] = lambda request: None
    """Called before the prefill side is asked; may raise `Lost`."""
    on_prefill_event: Callable[[TokenEvent], TokenEvent | None] = lambda event: event
    """What becomes of an event on its way to the decode side; None: it is lost."""
    on_decode_event: Callable[[TokenEvent], None] = lambda event: None
    """Called with each event that the decode side tells."""

    def submit(self, request: GenerateRequest) -> queue.Queue[TokenEvent]:
        """The events of a request, which is handed off where the decode side gives a ticket."""
        events: queue.Queue[TokenEvent] = queue.Queue()

        def deliver(event: TokenEvent) -> None:
            self.on_decode_event(event)
            if event.ticket is not None:
                self.tickets.append(event.ticket)
                self._ask(request, event.ticket)
            else:
                events.put(event)

        self.decode.engine.submit(request.model_copy(update={"reserves": True}), deliver)
        return events

    def run(self, request: GenerateRequest) -> TokenEvent:
        return InProcess.finish(self.submit(request))

    def _ask(self, request: GenerateRequest, ticket: KVTicket) -> None:
        """What an ingress does with a ticket."""
        with_ticket = request.model_copy(update={"request_id": ticket.ticket_id, "ticket": ticket, "reserves": False})
        try:
            self.on_prefill_request(with_ticket)
            self._deliver_to_decode(TokenEvent(request_id=ticket.ticket_id))
            self.prefill.engine.submit(with_ticket, self._deliver_to_decode)
        except Lost as lost:
            self._deliver_to_decode(TokenEvent(request_id=ticket.ticket_id, finish="error", error=str(lost)))
        except RequestRefused as refused:
            self._deliver_to_decode(
                TokenEvent(request_id=ticket.ticket_id, finish="error", refused=refused.code, error=str(refused))
            )

    def _deliver_to_decode(self, event: TokenEvent) -> None:
        passed = self.on_prefill_event(event)
        if passed is not None:
            self.decode.engine.on_ticket_event(passed)

    def wait_until_idle(self, timeout_s: float = _WAIT_S) -> None:
        """Until no block of either side is held."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if all(_is_idle(side) for side in (self.prefill, self.decode)):
                return
            time.sleep(0.002)
        raise AssertionError(f"blocks are still held: {[side.engine.stats() for side in (self.prefill, self.decode)]}")


class Lost(Exception):
    """The prefill side is gone, as far as an ingress can tell."""


def _is_idle(side: InProcess) -> bool:
    stats = side.engine.stats()
    return stats.free_blocks + stats.cached_blocks == stats.total_blocks and stats.running == stats.waiting == 0


@contextmanager
def pools(
    model: TinyModel,
    prefill: str,
    decode: str,
    prefill_config: EngineConfig,
    decode_config: EngineConfig,
    transport: Callable[[Switchboard, str], Transport] = LocalTransport,
    range_bytes: int = 1,
    **settings: object,
) -> Iterator[Pools]:
    """Replicas under two layouts. `settings`: of `DisaggregationConfig`, on both sides; `transport` makes those of ranks;
    `range_bytes`: see
    `RankConfig`, so few that every range is sent by itself."""
    board = Switchboard()
    make = partial(transport, board)
    with (
        in_process(model, prefill, *_side(make, "prefill", prefill, prefill_config, range_bytes, settings)) as one,
        in_process(model, decode, *_side(make, "decode", decode, decode_config, range_bytes, settings)) as other,
    ):
        yield Pools(one, other, board)


def _side(
    make: Callable[[str], Transport],
    name: str,
    layout: str,
    config: EngineConfig,
    range_bytes: int,
    settings: dict[str, object],
) -> tuple[EngineConfig, torch.dtype, Callable[[Parts], Parts]]:
    parsed = Layout.parse(layout)
    disaggregation = DisaggregationConfig.model_validate({"layout": parsed, "least_tokens": 1, **settings})

    def attach(parts: Parts) -> Parts:
        transport = make(f"{name}{parts.config.world_rank}")
        ranked = parts.config.model_copy(update={"handoff_range_bytes": range_bytes})
        kv_connector = KVConnectorWorker.of(ranked, parts.identity, parts.cache, transport, "local", "a" * 64)
        if config.offload is None:
            return replace(parts, kv_connector=kv_connector)
        return replace(
            parts,
            kv_connector=kv_connector,
            kv_offload=KVOffloadWorker(
                parts.config, parts.identity, parts.cache, config.offload.tiers, config.offload.kv_format.model_digest
            ),
        )

    return config.model_copy(update={"disaggregation": disaggregation, "kv_owners": parsed.kv_owners}), torch.float32, attach
