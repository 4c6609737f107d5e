"""The ingress's part in prefill/decode disaggregation: with a KV transfer ticket, it asks a replica that computes prompts, and
notifies the decode side if none can.

ingress ──request, ticket──→ prefill replica ── first token, how it ended ──→ decode replica
        ──refused, or lost───────────────────────────────────────────────────→
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context

from actors.engine.link.token_stream import IngressGone, ReplyTo, TokenSender
from actors.wire.kv import KVTicket
from actors.wire.requests import GenerateRequest, TokenEvent
from serve_app.routing.broadcast import LOST
from serve_app.routing.pool_members import PoolMember, PoolMembers

_REACH_S, _REACH_EVERY_S = 5.0, 0.005
_ASK_ANOTHER = ("engine_down", "wrong_role")


class PrefillReplicas:
    """The replicas of the pools that compute prompts."""

    def __init__(self, pool_members: PoolMembers) -> None:
        self._pool_members, self._sender = pool_members, TokenSender()

    async def run(self, request: GenerateRequest, ticket: KVTicket, by: str, ended: Callable[[str | None], None]) -> None:
        """Have the prompt of `request` computed and its KV sent to the replica named `by`, which issued `ticket` and decodes.
        The least busy other replica is asked first; one that is down or refuses is passed over.

        Returns when that has ended in any way; cancelling gives it up. If no replica computes the prompt, the decode replica is
        notified. `ended` is called with the reason of a failure, or with None if everything was sent. It is not called if the
        replica was too busy or the request was cancelled.
        """
        asked = request.model_copy(update={"request_id": ticket.ticket_id, "reserves": False, "ticket": ticket})
        excluded: list[str] = []
        while (member := self._pool_members.least_busy(self._pool_members.able_for(by, excluded))) is not None:
            last = await self._ask(asked, member)
            if last is None:
                ended(None)
                return
            if last.refused not in _ASK_ANOTHER:
                break
            excluded += [member.name, last.refused_by or ""]
        else:
            last = _nobody(asked)
        if last.refused is not None or last.finish in ("error", "lost"):  # the replica itself reports any other end
            await self._notify(ReplyTo.unpack(ticket.reply_to), last)
        if last.error is not None and last.refused != "engine_busy":
            ended(last.error)

    async def _ask(self, request: GenerateRequest, member: PoolMember) -> TokenEvent | None:
        """Ask one replica. Returns None if all went well, else its last event."""
        assert request.ticket is not None
        generate = self._pool_members.generate(member)
        with self._pool_members.giving(member.name):
            # Runs in a context of its own: see `HandleBackend`.
            call = Context().run(generate.remote, request.pack(), request.ticket.reply_to, preferred_replica=member.name)
            try:
                last = await call
            except LOST as error:
                reason = f"the prefill replica {member.name} was lost: {type(error).__name__}"
                return TokenEvent(request_id=request.request_id, finish="error", error=reason)
            except asyncio.CancelledError:
                call.cancel()
                raise
        return None if last is None else TokenEvent.unpack(last)

    async def _notify(self, to: ReplyTo, event: TokenEvent) -> None:
        """Notify a decode replica. If it cannot be reached, it notices by itself from the missing heartbeats."""
        with suppress(IngressGone, TimeoutError):
            async with asyncio.timeout(_REACH_S):
                while not self._sender.connected(to):  # noqa: ASYNC110 - a socket has no event to wait for
                    await asyncio.sleep(_REACH_EVERY_S)
            self._sender.send(to, event)
            self._sender.flush()


def _nobody(request: GenerateRequest) -> TokenEvent:
    reason = "no other replica takes prompts"
    return TokenEvent(request_id=request.request_id, finish="error", refused="engine_down", error=reason)
