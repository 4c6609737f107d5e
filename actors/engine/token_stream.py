"""Token events from engines to the ingress over ZeroMQ: one small message an event, no Ray call and no pickle.

    engine: PUSH, connected, one per ingress ──→ [secret, TokenEvent] ──→ ingress: PULL, bound

A request travels to the engine with the address and secret of the ingress that waits for it; its events come back here.
(Through Ray's own streaming an event costs about a millisecond of two processes, more than a small model's token.)
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import threading
from typing import Self

import msgpack
import zmq
import zmq.asyncio
from pydantic import ValidationError

from actors.messages import Message, TokenEvent

MAX_MESSAGE_BYTES = 1 << 28

logger = logging.getLogger(__name__)


class ReplyTo(Message):
    """Where the events of a request go."""

    address: str
    secret: bytes


class TokenSender:
    """The engine's end: remembers a socket for every ingress it has answered. Any thread may send."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}

    def send(self, to: ReplyTo, event: TokenEvent) -> None:
        """Queue an event for an ingress. Never waits; events for an ingress that is gone are dropped in the end."""
        with self._lock:
            self._socket(to.address).send_multipart([to.secret, event.pack()], zmq.DONTWAIT)

    def close(self) -> None:
        """Close all sockets, after what was sent has had a second to leave. Calling twice is harmless."""
        with self._lock:
            for socket in self._sockets.values():
                socket.close(linger=1000)
            self._sockets.clear()

    def _socket(self, address: str) -> zmq.Socket[bytes]:
        if address not in self._sockets:
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
            socket.sndhwm = 0
            socket.linger = 0
            socket.connect(address)
            self._sockets[address] = socket
        return self._sockets[address]


class TokenReceiver:
    """The ingress's end. `listen` starts it on the running event loop, `events` is a request's queue."""

    def __init__(self, socket: zmq.asyncio.Socket, reply_to: ReplyTo) -> None:
        self._socket = socket
        self.reply_to = reply_to
        self._queues: dict[str, asyncio.Queue[TokenEvent]] = {}
        self._task = asyncio.get_running_loop().create_task(self._run())

    @classmethod
    def listen(cls, host: str) -> Self:
        """Bind to a port of `host` that the kernel chooses."""
        socket = zmq.asyncio.Context.instance().socket(zmq.PULL)
        socket.rcvhwm = 0
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        socket.bind(f"tcp://{host}:*")
        address = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        return cls(socket, ReplyTo(address=address, secret=secrets.token_bytes(16)))

    def open(self, request_id: str) -> asyncio.Queue[TokenEvent]:
        """The queue that the events of a request will be put in, until `forget`."""
        return self._queues.setdefault(request_id, asyncio.Queue())

    def forget(self, request_id: str) -> None:
        """Drop a request's queue; events that still come for it are ignored."""
        self._queues.pop(request_id, None)

    def close(self) -> None:
        """Stop listening."""
        self._task.cancel()
        self._socket.close(linger=0)

    async def _run(self) -> None:
        while True:
            self._take(await self._socket.recv_multipart())

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 2 or not hmac.compare_digest(frames[0], self.reply_to.secret):
            logger.warning("ignored a message on %s that does not carry this ingress's secret", self.reply_to.address)
            return
        try:
            event = TokenEvent.unpack(frames[1])
        except (ValidationError, ValueError, TypeError, msgpack.UnpackException):
            logger.warning("ignored a malformed event on %s", self.reply_to.address)
            return
        queue = self._queues.get(event.request_id)
        if queue is not None:
            queue.put_nowait(event)
