"""The Ray actor body of one rank: one device of one replica, with its weights, its KV pages and its communication groups.

    created → connect() → load() → run() … until the process ends

`run` normally never returns: its caller keeps the Ray reference as a sentinel, and detects the death of this rank through it.
Ranks are never restarted alone; their replica stops and recreates all of them.
"""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from actors.engine.link.zmq_link import ZmqRankLink
from actors.groups.distributed.rendezvous import serve_store
from actors.groups.group import Group
from actors.model.checkpoint.hash_cache import HashCache
from actors.model.checkpoint.weight_hasher import NoWeightHasher, WeightHasher
from actors.model.decoder import Decoder
from actors.rank.addresses import interface_of, own_address
from actors.rank.assembly import assemble_parts, identity_of, load_decoder
from actors.rank.connect_groups import connect
from actors.rank.stepping import run_plans
from actors.wire.rank_config import Loaded, RankConfig, RankLocation, RankStatus, Rendezvous
from placement.layout.layout import Layout
from placement.nodes.limits import cpu_limit, memory_limit


class Rank:
    """One rank of a replica.

    All methods except `status` and `location` are called from one thread, in the order that the module docstring shows.
    """

    def __init__(self, config: RankConfig) -> None:
        self._config = config
        self.identity = identity_of(config)
        self._groups: Mapping[str, Group] = {}
        self._status = RankStatus(state="created")
        self._store: object | None = None
        self._threads = 1
        self._decoder: Decoder

    def location(self, node_id: str, node: str) -> RankLocation:
        """Return the place where this process runs. `node_id` is Ray's id of the node (empty: the host name is used), and
        `node` the address or name by which Ray knows it.

        Raises `AddressError` if the node has no usable address.
        """
        host = own_address(node, os.environ)
        return RankLocation(
            world_rank=self._config.world_rank,
            node_id=node_id or socket.gethostname(),
            host=host,
            pid=os.getpid(),
            machine=f"{_boot_id() or socket.gethostname()} {_network()}",
            name=socket.gethostname(),
            interface=interface_of(host),
            memory_bytes=memory_limit().num_bytes,
        )

    def serve_store(self, token: str, host: str) -> int:
        """Serve the rendezvous store on a free port of the address `host` until this process ends (world rank 0 only). `token`
        identifies this generation of the replica, see `Rendezvous`. Returns the port."""
        self._store, port = serve_store(token, host)
        return port

    def connect(self, rendezvous: Rendezvous) -> None:
        """Join this rank's communication groups, together with all other ranks of the replica. Raises `GroupError` if the store
        cannot be used or a peer does not join in time."""
        self._threads = self._config.threads_per_rank or _share_of_cores(
            self._config.layout, rendezvous, self._config.world_rank
        )
        self._status = RankStatus(state="connecting")
        config = self._config
        self._groups = connect(config.spec, config.layout, config.world_rank, config.device, rendezvous)

    def load(self) -> Loaded:
        """Build this rank's stage and load its own weight slices from the checkpoint. Returns the bytes and seconds that this
        took, and the device memory left. If the replica needs a model digest, also the digests of this rank's share of the
        checkpoint.

        Raises `ModelError` if the model or its checkpoint cannot be used, or if the checkpoint changes meanwhile.
        """
        torch.set_num_threads(self._threads)
        began = time.perf_counter()
        with self._hasher() as hasher:
            self._decoder = load_decoder(self._config, self.identity, self._groups, self._progress, hasher.add)
            chunk_digests = hasher.finish()
        gc.collect()
        weight_bytes = sum(weight.numel() * weight.element_size() for weight in self._decoder.parameters())
        self._status = self._status.model_copy(update={"state": "loaded"})
        seconds = time.perf_counter() - began
        free_bytes = self._free_bytes()
        return Loaded(weight_bytes=weight_bytes, seconds=seconds, free_bytes=free_bytes, chunk_digests=chunk_digests)

    def run(self, address: str, token: str, num_blocks: int, model_digest: str) -> None:
        """Allocate `num_blocks` KV pages, connect to the engine's `ZmqEngineLink` at `address` with its `token`, and run its
        plans until the engine closes the link. `model_digest` may be empty if no KV leaves the ranks of this replica.

        Raises the exception of any failure that ends the rank earlier; a failure in a step is reported to the engine first.
        """
        torch.set_num_threads(self._threads)
        parts = assemble_parts(self._config, self.identity, self._groups, self._decoder, num_blocks, model_digest)
        link = ZmqRankLink(address, self._config.world_rank, token)
        self._status = self._status.model_copy(update={"state": "running"})
        try:
            run_plans(parts, link, self._stepped)
        finally:
            self._status = self._status.model_copy(update={"state": "failed"})

    def status(self) -> RankStatus:
        """Return the state and progress of this rank. Safe to call while another method runs."""
        return self._status

    def _hasher(self) -> WeightHasher | NoWeightHasher:
        config = self._config
        if not config.needs_model_digest:
            return NoWeightHasher()
        cache = HashCache.of_user(os.environ)
        return WeightHasher(Path(config.model_path), config.spec, config.layout, config.world_rank, self._threads, cache)

    def _stepped(self) -> None:
        self._status = self._status.model_copy(update={"steps": self._status.steps + 1})

    def _progress(self, done: int, total: int) -> None:
        self._status = RankStatus(state="loading", loaded_bytes=done, total_bytes=total)

    def _free_bytes(self) -> int | None:
        if self._config.device != "cuda":
            return None
        free, _total = torch.cuda.mem_get_info(self._config.device)
        return int(free)


def _boot_id() -> str:
    """Return the boot id of this machine's kernel; empty if the system does not provide one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _network() -> str:
    """Return the id of this process's network namespace, which differs between containers of one machine; empty if unknown."""
    try:
        return str(Path("/proc/self/ns/net").readlink())
    except OSError:
        return ""


def _share_of_cores(layout: Layout, rendezvous: Rendezvous, world_rank: int) -> int:
    """Return the number of CPU threads for this rank: an even share of the cores of its machine that it may use.

    The share assumes that all replicas run on this machine. This may use too few cores, but never oversubscribes them. Ranks
    with the same address count as one machine, even if they belong to several Ray nodes.
    """
    here = rendezvous.hosts.count(rendezvous.hosts[world_rank]) * layout.replicas
    return max(1, cpu_limit() // here)
