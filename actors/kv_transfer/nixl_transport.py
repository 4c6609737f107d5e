"""The KV transport between processes and hosts, over NIXL.

NIXL agents write into each other's registered CPU or GPU memory through UCX (RDMA, TCP or shared memory).

An agent that a process inherits by fork never completes a transfer, so a process that uses this transport must be spawned. The
data must be complete before it is written: on a GPU, the caller synchronizes its stream before `write`.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module, metadata
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from actors.kv_transfer.transport import Notice, Ranges, TransferError, checked_pools
from actors.wire.message import Message

PACKAGES = ("nixl_cu12", "nixl_cu13")
"""The Python modules that NIXL is distributed as, one per CUDA version; both work without a GPU."""


_PROGRESS_EVERY_US = 1000
"""Microseconds after which NIXL's progress thread looks at a peer that has not woken it."""


class _Description(Message):
    """The description that a peer needs to write to this process: NIXL's metadata, and (address, bytes, device) per pool."""

    name: str
    agent: bytes
    memory: str
    pools: dict[int, tuple[int, int, int]]


class NixlTransfer:
    """A write in progress, identified by its NIXL handle."""

    def __init__(self, transport: NixlTransport, handle: Any, peer: str, what: str) -> None:
        self._transport, self._handle, self._peer, self._what = transport, handle, peer, what
        self._done = False

    def is_done(self) -> bool:
        """See `Transfer.is_done`. Also raises `TransferError` after the transport is closed."""
        if not self._done:
            try:
                state = self._transport.agent.check_xfer_state(self._handle)
            except Exception as error:  # NIXL raises a different exception class for each status
                raise TransferError(f"{self._what} to {self._peer} failed: {error}") from error
            if state == "ERR":
                raise TransferError(f"{self._what} to {self._peer} failed; the peer may be gone")
            self._done = state == "DONE"
            if self._done:
                self._transport.agent.release_xfer_handle(self._handle)
        return self._done


class TagOnly:
    """A write of a tag without data, which is done at once."""

    def is_done(self) -> bool:
        """See `Transfer.is_done`. Always returns true."""
        return True


class NixlTransport:
    """The `Transport` of one process. `backend` is the NIXL plugin that moves the bytes."""

    def __init__(self, name: str, backend: str = "UCX") -> None:
        api = _api()
        self.name = f"{name}-{uuid.uuid4().hex[:12]}"  # unique, so that peers see a restarted rank as a new agent
        self.bytes_sent = 0
        self._backend, self._process = backend, os.getpid()
        with _sleeping_progress_thread(api.nixlBind):
            self._agent: Any = api.nixl_agent(self.name, api.nixl_agent_config(backends=[backend]))
        self._pools: dict[int, tuple[int, int, int]] = {}
        self._memory, self._registered = "DRAM", None
        self._kept: list[Tensor] = []
        self._peers: dict[str, _Description] = {}

    @property
    def agent(self) -> Any:
        """The NIXL agent (`nixl_agent`). Raises `TransferError` after `close`, and in a process forked from the one that
        created the agent."""
        if self._agent is None:
            raise TransferError(f"NIXL agent {self.name} has been closed")
        if os.getpid() != self._process:
            raise TransferError(
                f"NIXL agent {self.name} was made by process {self._process} and is used by {os.getpid()}, a fork of it, where "
                "no transfer would ever end: start the process with spawn"
            )
        return self._agent

    def register(self, pools: Mapping[int, Tensor]) -> None:
        """See `Transport.register`. Also raises `ValueError` if the tensors are on several kinds of device, and `TransferError`
        after `close`."""
        flat = checked_pools(pools)
        kinds = {tensor.device.type for tensor in flat.values()}
        if len(kinds) > 1:
            raise ValueError(f"pools are on {sorted(kinds)}, but the pools of a transport must be on one kind of device")
        self._memory = "DRAM" if kinds <= {"cpu"} else "VRAM"
        self._kept = list(flat.values())
        self._pools = {pool: (x.data_ptr(), x.numel(), max(0, x.get_device())) for pool, x in flat.items()}
        regions = [(*where, "") for where in self._pools.values()]
        self._registered = self.agent.register_memory(regions, self._memory, backends=[self._backend])

    def describe(self) -> bytes:
        """See `Transport.describe`. Raises `TransferError` after `close`."""
        agent = self.agent.get_agent_metadata()
        return _Description(name=self.name, agent=agent, memory=self._memory, pools=self._pools).pack()

    def connect(self, description: bytes) -> str:
        """See `Transport.connect`."""
        try:
            peer = _Description.unpack(description)
        except (ValidationError, ValueError, TypeError, msgpack.UnpackException) as error:
            raise TransferError(f"a description of {len(description)} bytes is not one of a NIXL peer: {error}") from None
        self.disconnect(peer.name)
        try:
            self.agent.add_remote_agent(peer.agent)
        except Exception as error:
            raise TransferError(f"{self.name} cannot reach {peer.name}: {error}") from error
        self._peers[peer.name] = peer
        return peer.name

    def write(self, peer: str, ranges: Ranges, tag: bytes) -> NixlTransfer | TagOnly:
        """See `Transport.write`. The values must be complete: on a GPU, the caller synchronizes its stream first."""
        there = self._peers.get(peer)
        if there is None:
            raise TransferError(f"{self.name} is not connected to {peer!r}, only to {sorted(self._peers)}")
        ranges.check(_sizes(self._pools), _sizes(there.pools))
        what = f"a write of {ranges.num_bytes:,} bytes in {len(ranges):,} ranges"
        try:
            if not len(ranges):
                self.agent.send_notif(peer, tag)
                return TagOnly()
            transfer = NixlTransfer(self, self._begin(there, ranges, tag), peer, what)
        except Exception as error:
            raise TransferError(f"{what} from {self.name} to {peer} could not be started: {error}") from error
        self.bytes_sent += ranges.num_bytes
        return transfer

    def _begin(self, there: _Description, ranges: Ranges, tag: bytes) -> Any:
        agent, table = self.agent, ranges.table
        own = agent.get_xfer_descs(_addresses(self._pools, table[:, [0, 1, 4]]), self._memory)
        peers = agent.get_xfer_descs(_addresses(there.pools, table[:, 2:]), there.memory)
        handle = agent.initialize_xfer("WRITE", own, peers, there.name, tag, backends=[self._backend])
        if agent.transfer(handle) == "ERR":
            agent.release_xfer_handle(handle)
            raise TransferError("NIXL refused it")
        return handle

    def poll(self) -> list[Notice]:
        """See `Transport.poll`. Raises `TransferError` after `close`."""
        notifications = self.agent.get_new_notifs(backends=[self._backend])
        return [Notice(peer, tag) for peer, tags in notifications.items() for tag in tags]

    def disconnect(self, peer: str) -> None:
        """See `Transport.disconnect`."""
        if self._peers.pop(peer, None) is not None:
            self.agent.remove_remote_agent(peer)

    def close(self) -> None:
        """See `Transport.close`. Calling this twice is harmless."""
        if self._agent is None:
            return
        for peer in list(self._peers):
            self.disconnect(peer)
        if self._registered is not None:
            self.agent.deregister_memory(self._registered, backends=[self._backend])
        self._registered, self._kept, self._pools = None, [], {}
        self._agent = None  # dropping the last reference ends the agent's progress thread


def is_installed() -> bool:
    """Returns whether NIXL can be imported, and imports it if so."""
    try:
        _api()
    except TransferError:
        return False
    return True


def nixl_version() -> str:
    """Returns the version of the NIXL package in use, for the handshake. Raises `TransferError` if none is installed."""
    name = _api().__name__.split(".")[0].replace("_", "-")
    return metadata.version(name)


@contextmanager
def _sleeping_progress_thread(bindings: Any) -> Iterator[None]:
    """Have the agents that are made in this context wait for events in their progress thread, up to `_PROGRESS_EVERY_US`.

    NIXL's Python package (1.5) sets this time to 0 in every agent's configuration, and then the thread polls without a pause:
    one core for each rank, idle or not.
    """
    plain = bindings.nixlAgentConfig

    class Sleeping(plain):  # type: ignore[misc, valid-type]
        """NIXL's own configuration, whose time of waiting cannot be set to 0."""

        @property
        def pthrDelay(self) -> Any:
            return plain.pthrDelay.__get__(self)

        @pthrDelay.setter
        def pthrDelay(self, delay_us: int) -> None:
            plain.pthrDelay.__set__(self, max(delay_us, _PROGRESS_EVERY_US))

    bindings.nixlAgentConfig = Sleeping
    try:
        yield
    finally:
        bindings.nixlAgentConfig = plain


def _api() -> Any:
    faults = []
    for package in PACKAGES:
        try:
            return import_module(f"{package}._api")
        except ImportError as error:
            faults.append(str(error))
    raise TransferError(f"NIXL cannot be imported ({'; '.join(faults)}): pip install 'shardwright[pools]'")


def _addresses(pools: Mapping[int, tuple[int, int, int]], runs: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Convert runs [runs, 3] of (pool, offset, length) into NIXL's form, [runs, 3] of (address, length, device)."""
    where = np.array([pools[pool] for pool in runs[:, 0].tolist()], np.int64)
    return np.stack((where[:, 0] + runs[:, 1], runs[:, 2], where[:, 2]), 1).astype(np.uint64)


def _sizes(pools: Mapping[int, tuple[int, int, int]]) -> dict[int, int]:
    return {pool: size for pool, (_, size, _) in pools.items()}
