"""The link between an engine and its ranks over ZeroMQ: two-frame messages with msgpack payloads, never pickle.

    engine: ROUTER, bound                                  rank: DEALER, connected
      ←─ HELLO  {world_rank, token}      every rank, once, before the first plan
      ─→ PLAN   StepPlan                 every rank, packed once
      ←─ RESULT StepResult               from the output rank of each DP rank
      ←─ BUSY   {stage, seconds}         from one rank of each of several stages (of each DP rank), after each step
      ←─ EXPERTS ExpertReport            from ranks with experts, if a plan asks for it
      ←─ KV      KVReport                from ranks with KV transfers, whenever one has made progress
      ←─ FAILED text                     from any rank that has failed
      ─→ BYE                             every rank, when the engine closes

The token is random and new for each set of ranks. A HELLO with another token (from a leftover rank of an earlier set, or from
an unrelated process) is logged and ignored, and so is any message from a peer without an accepted HELLO.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

import msgpack
import zmq
from pydantic import ValidationError

from actors.engine.link.link import LinkClosed, LinkError, LinkTimeout
from actors.engine.link.result_joiner import ResultJoiner
from actors.wire.experts import ExpertReport
from actors.wire.kv import KVReport
from actors.wire.message import Message
from actors.wire.plans import StepPlan
from actors.wire.results import StepResult

HELLO, PLAN, RESULT, BUSY, EXPERTS, KV, FAILED, BYE = b"H", b"P", b"R", b"T", b"E", b"K", b"F", b"B"
MAX_MESSAGE_BYTES = 1 << 28
_M = TypeVar("_M", bound=Message)
_MALFORMED = (ValidationError, ValueError, TypeError, msgpack.UnpackException)

logger = logging.getLogger(__name__)


class Hello(Message):
    """The first message of a rank, with which it registers at the engine."""

    world_rank: int
    token: str


class Busy(Message):
    """The seconds that a pipeline stage has been busy so far."""

    stage: int
    seconds: float


def _socket(kind: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 0  # a full queue would block the step loop; one plan is in flight, so none fills
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    return socket


def _poll(socket: zmq.Socket[bytes], deadline: float) -> bool:
    """Wait until a message can be read. Returns False if none arrives before `deadline` (on the monotonic clock)."""
    remaining_ms = max(0.0, (deadline - time.monotonic()) * 1000)
    # Rounded up: poll counts whole milliseconds, and 0 would spin until the deadline.
    return bool(socket.poll(int(remaining_ms) + (remaining_ms > 0), zmq.POLLIN))


class ZmqEngineLink:
    """The engine's end, a `RankLink`. It binds on construction; the ranks connect to `address`."""

    def __init__(self, world: int, output_ranks: Sequence[int], token: str, bind: str = "tcp://127.0.0.1:*") -> None:
        """Bind to `bind`, which is ``tcp://HOST:*`` (the kernel chooses a port) or ``ipc://PATH``.

        `output_ranks` holds, for each DP rank, the world rank that sends its results.
        """
        self.world = world
        self._joiner = ResultJoiner(output_ranks)
        self.busy_s: dict[int, float] = {}
        self.reports: deque[ExpertReport] = deque()
        self.kv_reports: deque[KVReport] = deque()
        self._token = token
        self._peers: dict[bytes, int] = {}
        """World rank of each peer whose HELLO was accepted."""
        self._socket = _socket(zmq.ROUTER)
        self._socket.router_mandatory = True  # sending to a lost rank raises instead of dropping the message
        self._socket.bind(bind)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until all ranks have registered. Raises `LinkTimeout`, naming the missing ones, after `timeout_s` seconds, and
        `LinkError` if a rank failed."""
        deadline = time.monotonic() + timeout_s
        while len(self._peers) < self.world:
            if not _poll(self._socket, deadline):
                missing = sorted(set(range(self.world)) - set(self._peers.values()))
                raise LinkTimeout(f"ranks {missing} of {self.world} did not connect to {self.address} within {timeout_s:g} s")
            self._read()

    def send(self, plan: StepPlan) -> None:
        """See `RankLink.send`."""
        data = plan.pack()
        for peer, rank in self._peers.items():
            try:
                self._socket.send_multipart([peer, PLAN, data])
            except zmq.ZMQError as error:
                raise LinkError(f"plan {plan.step} cannot be sent to rank {rank}: {error}") from error

    def receive(self, timeout_s: float) -> StepResult:
        """See `RankLink.receive`."""
        deadline = time.monotonic() + timeout_s
        while _poll(self._socket, deadline):
            result = self._read()
            if result is not None:
                return result
        raise LinkTimeout(f"no result from ranks {self._joiner.missing} within {timeout_s:g} s")

    def listen(self, timeout_s: float) -> None:
        """See `RankLink.listen`."""
        deadline = time.monotonic() + timeout_s
        while not self.kv_reports and _poll(self._socket, deadline):
            self._read()

    def close(self) -> None:
        """See `RankLink.close`. The messages to the ranks have one second to be sent."""
        if self._socket.closed:
            return
        for peer in self._peers:
            try:
                self._socket.send_multipart([peer, BYE, b""], zmq.DONTWAIT)
            except zmq.ZMQError:
                logger.debug("rank %d was gone before BYE could be sent", self._peers[peer])
        self._socket.close(linger=1000)  # in milliseconds, in the background, so that the BYE messages are sent

    def _read(self) -> StepResult | None:
        """Read one message. Returns the joined result of a step if the message completes it, and None in all other cases."""
        peer, *frames = self._socket.recv_multipart()
        if len(frames) != 2:
            logger.warning("ignored a message of %d frames on %s", len(frames), self.address)
            return None
        kind, data = frames
        if kind == HELLO:
            self._on_hello(peer, data)
        elif peer not in self._peers:
            logger.warning("ignored a message of kind %r on %s from a peer that said no hello", kind, self.address)
        elif kind == FAILED:
            raise LinkError(f"rank {self._peers[peer]} failed: {data.decode('utf-8', 'replace')}")
        elif kind == BUSY:
            busy = _unpack(Busy, data, f"busy time of rank {self._peers[peer]}")
            self.busy_s[busy.stage] = busy.seconds
        elif kind == EXPERTS:
            self.reports.append(_unpack(ExpertReport, data, f"experts of rank {self._peers[peer]}"))
        elif kind == KV:
            self.kv_reports.append(_unpack(KVReport, data, f"hand-offs of rank {self._peers[peer]}"))
        elif kind == RESULT and self._peers[peer] in self._joiner:
            rank = self._peers[peer]
            return self._joiner.add(rank, _unpack(StepResult, data, f"result of rank {rank}"))
        else:
            logger.warning("ignored a message of kind %r from rank %d", kind, self._peers[peer])
        return None

    def _on_hello(self, peer: bytes, data: bytes) -> None:
        try:
            hello = _unpack(Hello, data, "hello")
        except LinkError as error:
            logger.warning("ignored on %s: %s", self.address, error)
            return
        rank = hello.world_rank
        if not hmac.compare_digest(hello.token.encode("utf-8", "replace"), self._token.encode()):
            logger.warning("ignored rank %d on %s: its token is not that of these ranks", rank, self.address)
        elif not 0 <= rank < self.world or rank in self._peers.values():
            logger.warning("ignored rank %d on %s: taken, or not one of %d ranks", rank, self.address, self.world)
        else:
            self._peers[peer] = rank


class ZmqRankLink:
    """A rank's end, a `PlanLink`. It connects and sends HELLO on construction; ZeroMQ retries until the engine has bound."""

    def __init__(self, address: str, world_rank: int, token: str) -> None:
        self.address, self.world_rank = address, world_rank
        self._socket = _socket(zmq.DEALER)
        # An explicit routing id survives a broken TCP connection, so that the engine recognizes the rank when it reconnects.
        self._socket.routing_id = b"%d-" % world_rank + secrets.token_hex(8).encode()
        self._socket.connect(address)
        self._send(HELLO, Hello(world_rank=world_rank, token=token).pack())

    def receive_plan(self, timeout_s: float) -> StepPlan:
        """See `PlanLink.receive_plan`."""
        if not _poll(self._socket, time.monotonic() + timeout_s):
            raise LinkTimeout(f"rank {self.world_rank}: no plan from {self.address} within {timeout_s:g} s")
        frames = self._socket.recv_multipart()
        if frames == [BYE, b""]:
            raise LinkClosed(f"rank {self.world_rank}: the engine at {self.address} closed the link")
        if len(frames) != 2 or frames[0] != PLAN:
            raise LinkError(f"rank {self.world_rank}: a message of {len(frames)} frames that is no plan, from {self.address}")
        return _unpack(StepPlan, frames[1], "plan")

    def send_result(self, result: StepResult) -> None:
        """See `PlanLink.send_result`."""
        self._send(RESULT, result.pack())

    def send_busy(self, stage: int, seconds: float) -> None:
        """See `PlanLink.send_busy`."""
        self._send(BUSY, Busy(stage=stage, seconds=seconds).pack())

    def send_experts(self, report: ExpertReport) -> None:
        """See `PlanLink.send_experts`."""
        self._send(EXPERTS, report.pack())

    def send_kv(self, report: KVReport) -> None:
        """See `PlanLink.send_kv`."""
        self._send(KV, report.pack())

    def send_failure(self, reason: str) -> None:
        """See `PlanLink.send_failure`."""
        self._send(FAILED, reason.encode("utf-8", "replace"))

    def close(self) -> None:
        """See `PlanLink.close`. Pending messages have one second to be sent."""
        self._socket.close(linger=1000)

    def _send(self, kind: bytes, data: bytes) -> None:
        self._socket.send_multipart([kind, data])


def _unpack(message: type[_M], data: bytes, what: str) -> _M:
    try:
        return message.unpack(data)
    except _MALFORMED as error:
        raise LinkError(f"malformed {what} ({len(data)} bytes): {error}") from error
