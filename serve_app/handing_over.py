"""What an ingress does with a ticket: it asks a prefill replica, and tells the decode side where nobody can be asked.

ingress ──request, ticket──→ prefill replica ── first token, how it ended ──→ decode replica
        ──refused, or lost───────────────────────────────────────────────────→
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from contextvars import Context
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from actors.engine.token_stream import IngressGone, ReplyTo, TokenSender
from actors.messages import GenerateRequest, KVTicket, TokenEvent

_REACH_S, _REACH_EVERY_S = 5.0, 0.005


class PrefillPool:
    """The prefill replicas behind a Serve handle."""

    def __init__(self, prefill: DeploymentHandle[Any]) -> None:
        self.handle = prefill
        self.generate: Any = prefill.options(method_name="generate")
        self._sender = TokenSender()

    async def run(self, request: GenerateRequest, ticket: KVTicket) -> None:
        """Have the prompt computed. Returns when the prefill side is done, however it ended; cancelled, it gives up."""
        asked = request.model_copy(update={"request_id": ticket.ticket_id, "reserves": False, "ticket": ticket})
        avoid: list[str] = []
        while True:
            ended = await self._ask(asked, avoid)
            if ended is None:
                return
            if ended.refused != "engine_down" or ended.refused_by in (None, *avoid):
                await self._tell(ReplyTo.unpack(ticket.reply_to), ended)
                return
            avoid.append(ended.refused_by or "")

    async def _ask(self, request: GenerateRequest, avoid: list[str]) -> TokenEvent | None:
        """One replica. None where it has told the decode side itself how it ended."""
        assert request.ticket is not None
        # In a context of its own: see `HandleBackend`.
        call = Context().run(self.generate.remote, request.pack(), request.ticket.reply_to, avoid=tuple(avoid))
        try:
            refused = await call
        except (RayError, RayServeException) as error:
            reason = f"the prefill replica was lost: {type(error).__name__}"
            return TokenEvent(request_id=request.request_id, finish="error", error=reason)
        except asyncio.CancelledError:
            call.cancel()
            raise
        return None if refused is None else TokenEvent.unpack(refused)

    async def _tell(self, to: ReplyTo, event: TokenEvent) -> None:
        """Tell a decode replica. One that cannot be reached finds out by itself, from nobody's having said a word."""
        with suppress(IngressGone, TimeoutError):
            async with asyncio.timeout(_REACH_S):
                while not self._sender.connected(to):  # noqa: ASYNC110 - a socket has no event to wait for
                    await asyncio.sleep(_REACH_EVERY_S)
            self._sender.send(to, event)
            self._sender.flush()
