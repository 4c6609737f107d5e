"""The link between engine and ranks over ZeroMQ: msgpack in two-frame messages, never pickle.

    engine: ROUTER, bound                                  rank: DEALER, connected
      ←─ HELLO  {world_rank, token}      every rank, once, before the first plan
      ─→ PLAN   StepPlan                 every rank, packed once
      ←─ RESULT StepResult               from the output rank of each DP rank
      ←─ BUSY   {stage, seconds}         from one rank of each of several stages (of each DP rank), after each step
      ←─ EXPERTS ExpertReport            from ranks with experts, where a plan asks for it
      ←─ KV      KVReport                from ranks of a pool, whenever a hand-off has come further
      ←─ FAILED text                     from any rank that cannot go on
      ─→ BYE                             every rank, when the engine closes

The token is drawn anew for each set of ranks. A hello with another token (a stray rank of an earlier set, a stranger on
the port) is logged and ignored, and so is whatever a peer sends that has not said a proper hello.
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
    """How a rank introduces itself."""

    world_rank: int
    token: str


class Busy(Message):
    """How long a stage has been busy so far."""

    stage: int
    seconds: float


def _socket(kind: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 0  # a full queue would block the step loop; one plan is in flight, so none fills
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    return socket


def _poll(socket: zmq.Socket[bytes], deadline: float) -> bool:
    """Whether something can be read before `deadline` (on the monotonic clock)."""
    remaining_ms = max(0.0, (deadline - time.monotonic()) * 1000)
    # Rounded up: poll counts whole milliseconds, and 0 would spin until the deadline.
    return bool(socket.poll(int(remaining_ms) + (remaining_ms > 0), zmq.POLLIN))


class ZmqEngineLink:
    """The engine's end. Binds on construction; `address` is where the ranks connect."""

    def __init__(self, world: int, output_ranks: Sequence[int], token: str, bind: str = "tcp://127.0.0.1:*") -> None:
        """`output_ranks`: the world rank of each DP rank that sends results. `bind`: ``tcp://HOST:*`` (the kernel chooses) or
        ``ipc://PATH``."""
        self.world = world
        self._joiner = ResultJoiner(output_ranks)
        self.busy_s: dict[int, float] = {}
        self.reports: deque[ExpertReport] = deque()
        self.kv_reports: deque[KVReport] = deque()
        self._token = token
        self._peers: dict[bytes, int] = {}
        """World rank of each peer that said a proper hello."""
        self._socket = _socket(zmq.ROUTER)
        self._socket.router_mandatory = True  # sending to a rank that is gone raises instead of vanishing
        self._socket.bind(bind)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def wait_ready(self, timeout_s: float) -> None:
        """Return when all ranks have said hello. Raises `LinkTimeout` naming the missing ones, `LinkError` where one failed."""
        deadline = time.monotonic() + timeout_s
        while len(self._peers) < self.world:
            if not _poll(self._socket, deadline):
                missing = sorted(set(range(self.world)) - set(self._peers.values()))
                raise LinkTimeout(f"ranks {missing} of {self.world} did not connect to {self.address} within {timeout_s:g} s")
            self._read()

    def send(self, plan: StepPlan) -> None:
        data = plan.pack()
        for peer, rank in self._peers.items():
            try:
                self._socket.send_multipart([peer, PLAN, data])
            except zmq.ZMQError as error:
                raise LinkError(f"plan {plan.step} cannot be sent to rank {rank}: {error}") from error

    def receive(self, timeout_s: float) -> StepResult:
        deadline = time.monotonic() + timeout_s
        while _poll(self._socket, deadline):
            result = self._read()
            if result is not None:
                return result
        raise LinkTimeout(f"no result from ranks {self._joiner.missing} within {timeout_s:g} s")

    def listen(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.kv_reports and _poll(self._socket, deadline):
            self._read()

    def close(self) -> None:
        if self._socket.closed:
            return
        for peer in self._peers:
            try:
                self._socket.send_multipart([peer, BYE, b""], zmq.DONTWAIT)
            except zmq.ZMQError:
                logger.debug("rank %d was gone before the goodbye", self._peers[peer])
        self._socket.close(linger=1000)  # milliseconds in the background, for the goodbyes to leave

    def _read(self) -> StepResult | None:
        """Take one message. Returns a step's result where it was the last one missing for it, None for everything else."""
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
    """A rank's end. Connects and says hello on construction (ZeroMQ keeps trying while nobody is bound yet)."""

    def __init__(self, address: str, world_rank: int, token: str) -> None:
        self.address, self.world_rank = address, world_rank
        self._socket = _socket(zmq.DEALER)
        # A name of its own survives a broken TCP connection, so the engine still knows who reconnects.
        self._socket.routing_id = b"%d-" % world_rank + secrets.token_hex(8).encode()
        self._socket.connect(address)
        self._send(HELLO, Hello(world_rank=world_rank, token=token).pack())

    def receive_plan(self, timeout_s: float) -> StepPlan:
        """The next plan. Raises `LinkTimeout` after `timeout_s`, `LinkClosed` when the engine said goodbye."""
        if not _poll(self._socket, time.monotonic() + timeout_s):
            raise LinkTimeout(f"rank {self.world_rank}: no plan from {self.address} within {timeout_s:g} s")
        frames = self._socket.recv_multipart()
        if frames == [BYE, b""]:
            raise LinkClosed(f"rank {self.world_rank}: the engine at {self.address} closed the link")
        if len(frames) != 2 or frames[0] != PLAN:
            raise LinkError(f"rank {self.world_rank}: a message of {len(frames)} frames that is no plan, from {self.address}")
        return _unpack(StepPlan, frames[1], "plan")

    def send_result(self, result: StepResult) -> None:
        """Answer a plan (the output rank of each DP rank only)."""
        self._send(RESULT, result.pack())

    def send_busy(self, stage: int, seconds: float) -> None:
        self._send(BUSY, Busy(stage=stage, seconds=seconds).pack())

    def send_experts(self, report: ExpertReport) -> None:
        self._send(EXPERTS, report.pack())

    def send_kv(self, report: KVReport) -> None:
        self._send(KV, report.pack())

    def send_failure(self, reason: str) -> None:
        """Tell the engine that this rank cannot go on; its `receive` raises `LinkError` with `reason` at once."""
        self._send(FAILED, reason.encode("utf-8", "replace"))

    def close(self) -> None:
        """Release the socket, after what was sent has had a second to leave. Calling twice is harmless."""
        self._socket.close(linger=1000)

    def _send(self, kind: bytes, data: bytes) -> None:
        self._socket.send_multipart([kind, data])


def _unpack(message: type[_M], data: bytes, what: str) -> _M:
    try:
        return message.unpack(data)
    except _MALFORMED as error:
        raise LinkError(f"malformed {what} ({len(data)} bytes): {error}") from error
