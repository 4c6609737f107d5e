"""A rank: one device's worth of one replica. Owns its weights, its KV pages and its place in every group.

    created → connect() → load() → run() … until the process ends

`run` never returns: its caller keeps the reference as a sentinel, and learns of this rank's death from it. Ranks are
never restarted alone; their replica ends and remakes all of them.
"""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress

import torch

from actors.config import Loaded, Place, RankConfig, RankStatus, Rendezvous
from actors.connect import connect
from actors.engine.link import LinkClosed, LinkTimeout
from actors.engine.zmq_link import ZmqRankLink
from actors.messages import StepPlan
from actors.model import attention
from actors.model.checkpoint.load import load
from actors.model.checkpoint.open_source import open_source
from actors.model.decoder import Decoder
from actors.model.group import Group
from actors.model.groups.rendezvous import serve_store
from actors.model.kv_cache import KVCache
from actors.runner import Runner
from actors.sampler import Sampler
from placement import mesh, shards
from placement.layout import Layout

_LISTEN_S = 3600.0
"""How long one wait for a plan lasts; then the next one begins."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Rank:
    """See the module. Methods but `status` and `place` are called from one thread, in the order above."""

    def __init__(self, config: RankConfig) -> None:
        self._config = config
        self._device = torch.device(config.device)
        self._dtype = _DTYPES[config.dtype]
        self._shard = shards.shard(config.spec, config.layout, mesh.coords(config.layout, config.world_rank))
        self._groups: Mapping[str, Group] = {}
        self._status = RankStatus(state="created")
        self._store: object | None = None
        self._threads = 1
        self._decoder: Decoder

    def place(self, node_id: str, host: str) -> Place:
        """Where this process runs."""
        return Place(world_rank=self._config.world_rank, node_id=node_id or socket.gethostname(), host=host, pid=os.getpid())

    def serve_store(self, token: str, host: str) -> int:
        """Serve the rendezvous store on a free port (world rank 0 only). Returns the port."""
        self._store, port = serve_store(token, host)
        return port

    def connect(self, rendezvous: Rendezvous) -> None:
        """Join this rank's groups. Raises `GroupError` when a peer does not come in time."""
        self._threads = self._config.threads or _share_of_cores(self._config.layout, rendezvous, self._config.world_rank)
        self._status = RankStatus(state="connecting")
        self._groups = connect(self._config.layout, self._config.world_rank, self._config.device, rendezvous)

    def load(self) -> Loaded:
        """Build this rank's stage and fill it from the checkpoint, reading its own slices only. Raises `ModelError`."""
        torch.set_num_threads(self._threads)
        began, spec = time.perf_counter(), self._config.spec
        backend = attention.choose(self._device, self._dtype, self._config.block_size)
        self._decoder = Decoder(spec, self._shard, self._groups["tp"], backend, self._dtype, self._device)
        weights = dict(self._decoder.named_parameters())
        source = open_source(self._config.model_path, spec)
        try:
            load(weights, spec, self._shard, source, self._progress)
        finally:
            source.close()
        gc.collect()
        weight_bytes = sum(weight.numel() * weight.element_size() for weight in weights.values())
        self._status = self._status.model_copy(update={"state": "loaded"})
        return Loaded(weight_bytes=weight_bytes, seconds=time.perf_counter() - began, free_bytes=self._free_bytes())

    def run(self, address: str, token: str, num_blocks: int) -> None:
        """Make the KV pages, greet the engine, and run its plans until it says goodbye. Raises whatever else ends the rank."""
        torch.set_num_threads(self._threads)
        runner = self._runner(num_blocks)
        link = ZmqRankLink(address, self._config.world_rank, token)
        answers = self._shard.last_stage and self._groups["tp"].rank == 0
        self._status = self._status.model_copy(update={"state": "running"})
        try:
            while True:
                result = runner.step(_next_plan(link))
                if answers and result is not None:
                    link.send_result(result)
                self._status = self._status.model_copy(update={"steps": self._status.steps + 1})
        except LinkClosed:
            return
        except Exception as error:
            link.send_failure(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._status = self._status.model_copy(update={"state": "failed"})
            link.close()
            for group in self._groups.values():
                group.close()

    def status(self) -> RankStatus:
        """How far this rank is. Safe to call while another method runs."""
        return self._status

    def _runner(self, num_blocks: int) -> Runner:
        spec, own = self._config.spec, self._shard
        cache = KVCache(
            own.layers, len(own.kv_heads), num_blocks, self._config.block_size, spec.head_dim, self._dtype, self._device
        )
        sampler = Sampler(self._groups["tp"], own.vocab, spec.vocab_size, self._device)
        return Runner(self._decoder, cache, self._groups["pp"], sampler, spec.hidden_size)

    def _progress(self, done: int, total: int) -> None:
        self._status = RankStatus(state="loading", loaded_bytes=done, total_bytes=total)

    def _free_bytes(self) -> int | None:
        if self._device.type != "cuda":
            return None
        free, _total = torch.cuda.mem_get_info(self._device)
        return int(free)


def _next_plan(link: ZmqRankLink) -> StepPlan:
    """The next plan, however long it takes: an idle engine sends none, and a rank that waits for one is not stuck."""
    while True:
        with suppress(LinkTimeout):
            return link.receive_plan(_LISTEN_S)


def _share_of_cores(layout: Layout, rendezvous: Rendezvous, world_rank: int) -> int:
    """This rank's share of the cores, as if all replicas were on its node: slower than need be, never oversubscribed."""
    here = rendezvous.nodes.count(rendezvous.nodes[world_rank]) * layout.replicas
    return max(1, len(os.sched_getaffinity(0)) // here)
