"""Token streaming from engines to the ingress over ZeroMQ: one message per step and ingress, without Ray calls or pickle.

    engine: PUSH, connected, one per ingress ──→ [secret, TokenEvents] ──→ ingress: PULL, bound

A request is sent to the engine with the address and secret of the ingress that waits for it, and its events return to that
address. (With Ray's own streaming an event costs about a millisecond in each of two processes, more than a token of a small
model.)
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

import msgpack
import zmq
import zmq.asyncio
from pydantic import ValidationError

from actors.wire.message import Message
from actors.wire.requests import TokenEvent, TokenEvents

MAX_MESSAGE_BYTES = 1 << 28

_TURN_S = 0.002
"""Maximum seconds for which arriving events may block other tasks of the ingress's event loop."""
_PING_MS, _PONG_MS = 2_000, 10_000
"""Interval and timeout of the ZeroMQ heartbeats of a connection, which detect a machine that vanishes without closing it."""

logger = logging.getLogger(__name__)


class ReplyTo(Message):
    """The address and secret to which the events of a request are sent."""

    address: str
    secret: bytes


class IngressGone(ConnectionError):
    """Raised if the ingress that waits for a request's events is not connected."""


class TokenSender:
    """The engine's end, which keeps one socket per ingress. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._outbox: dict[tuple[str, bytes], list[TokenEvent]] = {}

    def connected(self, to: ReplyTo) -> bool:
        """Return whether events can be sent to the ingress at `to` now. The first call for an address starts to connect and
        usually returns false. Raises `zmq.ZMQError` for a malformed address."""
        with self._lock:
            return _can_send(self._socket(to.address))

    def send(self, to: ReplyTo, event: TokenEvent) -> None:
        """Queue an event for the ingress at `to`, which the next `flush` sends. Raises `IngressGone` if the ingress is not
        connected."""
        with self._lock:
            if not _can_send(self._socket(to.address)):
                self._sockets.pop(to.address).close(linger=0)
                raise IngressGone(f"the ingress at {to.address} is gone")
            self._outbox.setdefault((to.address, to.secret), []).append(event)

    def flush(self) -> None:
        """Send the queued events, as one message per ingress. Never waits; a message that cannot be sent is dropped
        silently."""
        with self._lock:
            outbox, self._outbox = self._outbox, {}
            for (address, secret), events in outbox.items():
                with suppress(zmq.Again):
                    self._socket(address).send_multipart([secret, TokenEvents(events=events).pack()], zmq.DONTWAIT)

    def close(self) -> None:
        """Close all sockets. Pending messages have one second to be sent. Calling this twice is harmless."""
        with self._lock:
            for socket in self._sockets.values():
                socket.close(linger=1000)
            self._sockets.clear()

    def _socket(self, address: str) -> zmq.Socket[bytes]:
        if address not in self._sockets:
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
            socket.sndhwm = 0
            socket.linger = 0
            socket.immediate = True  # queue nothing for an ingress that is not connected
            socket.heartbeat_ivl, socket.heartbeat_timeout = _PING_MS, _PONG_MS
            socket.connect(address)
            self._sockets[address] = socket
        return self._sockets[address]


def _can_send(socket: zmq.Socket[bytes]) -> bool:
    return bool(socket.poll(0, zmq.POLLOUT))


class TokenReceiver:
    """The receiving end: an ingress, or a decode engine that receives the events of its tickets.

    `listen` creates one on the running event loop, and `open` returns the queue of a request. Events that belong to no open
    request are passed to `others`.
    """

    def __init__(self, socket: zmq.asyncio.Socket, reply_to: ReplyTo, others: Callable[[TokenEvent], None]) -> None:
        self._socket, self._others = socket, others
        self.reply_to = reply_to
        self._queues: dict[str, asyncio.Queue[TokenEvent]] = {}
        self._task = asyncio.get_running_loop().create_task(self._run())

    @classmethod
    def listen(cls, host: str, others: Callable[[TokenEvent], None] = lambda event: None) -> Self:
        """Return a receiver bound to a free TCP port of `host`, an address or interface of this machine. Its `reply_to` tells
        engines where to send. Must be called on a running event loop; raises `zmq.ZMQError` if it cannot bind.

        `others` is called, on the event loop, with each event whose request has no open queue.
        """
        socket = zmq.asyncio.Context.instance().socket(zmq.PULL)
        socket.rcvhwm = 0
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        socket.bind(f"tcp://{host}:*")
        address = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        return cls(socket, ReplyTo(address=address, secret=secrets.token_bytes(16)), others)

    def open(self, request_id: str) -> asyncio.Queue[TokenEvent]:
        """Return the queue into which the events of a request are put, in order, until `forget` is called. A second call
        returns the same queue."""
        return self._queues.setdefault(request_id, asyncio.Queue())

    def forget(self, request_id: str) -> None:
        """Remove the queue of a request, if there is one. Events that still arrive for it are passed to `others`."""
        self._queues.pop(request_id, None)

    def close(self) -> None:
        """Stop listening and close the socket. Open queues get no further events."""
        self._task.cancel()
        self._socket.close(linger=0)

    async def _run(self) -> None:
        turn_ends = 0.0
        while True:
            self._take(await self._socket.recv_multipart())  # does not yield to other tasks while messages are pending
            if time.monotonic() >= turn_ends:
                await asyncio.sleep(0)
                turn_ends = time.monotonic() + _TURN_S

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 2 or not hmac.compare_digest(frames[0], self.reply_to.secret):
            logger.warning("ignored a message on %s that does not carry this ingress's secret", self.reply_to.address)
            return
        try:
            events = TokenEvents.unpack(frames[1]).events
        except (ValidationError, ValueError, TypeError, msgpack.UnpackException):
            logger.warning("ignored malformed events on %s", self.reply_to.address)
            return
        for event in events:
            queue = self._queues.get(event.request_id)
            if queue is not None:
                queue.put_nowait(event)
            else:
                self._others(event)
