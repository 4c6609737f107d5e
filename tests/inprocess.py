"""A whole replica in one process: the real engine, link, runners and model, with the ranks as threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from actors.engine.config import EngineConfig
from actors.engine.engine import Engine
from actors.engine.link import LinkClosed
from actors.engine.zmq_link import ZmqEngineLink, ZmqRankLink
from actors.messages import GenerateRequest, TokenEvent
from actors.model.attention_cpu import CpuAttention
from actors.model.checkpoint.load import load
from actors.model.checkpoint.open_source import open_source
from actors.model.decoder import Decoder
from actors.model.group import Group
from actors.model.groups.solo import SoloGroup
from actors.model.groups.thread import thread_groups
from actors.model.kv_cache import KVCache
from actors.runner import Runner
from actors.sampler import Sampler
from placement import mesh, shards
from placement.layout import Layout
from placement.shards import Shard
from tests.tiny_models import TinyModel

_TOKEN = "in-process"
_WAIT_S = 60.0


class InProcess:
    """Submits to an engine and collects events."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def submit(self, request: GenerateRequest) -> queue.Queue[TokenEvent]:
        """The events of an accepted request, as they come."""
        events: queue.Queue[TokenEvent] = queue.Queue()
        self.engine.submit(request, events.put)
        return events

    def run(self, request: GenerateRequest) -> TokenEvent:
        """A request to its end, its events joined."""
        return self.finish(self.submit(request))

    @staticmethod
    def finish(events: queue.Queue[TokenEvent]) -> TokenEvent:
        """Wait for the last event; tokens and logprobs of all events are joined in it."""
        tokens, logprobs, scored = [], [], None
        while True:
            event = events.get(timeout=_WAIT_S)
            tokens.extend(event.tokens)
            logprobs.extend(event.logprobs)
            scored = event.prompt_logprobs or scored
            if event.finish is not None:
                return event.model_copy(update={"tokens": tokens, "logprobs": logprobs, "prompt_logprobs": scored})


@contextmanager
def in_process(model: TinyModel, layout: str, config: EngineConfig, dtype: torch.dtype = torch.float32) -> Iterator[InProcess]:
    """A running replica of `model` under `layout`."""
    parsed = Layout.parse(layout)
    axes = {axis: _axis_groups(parsed, axis) for axis in ("tp", "pp")}
    link = ZmqEngineLink(parsed.world, parsed.world - parsed.tp, _TOKEN)
    ranks = [
        threading.Thread(target=_rank, args=(model, parsed, rank, axes, config, link.address, dtype), daemon=True)
        for rank in range(parsed.world)
    ]
    for rank in ranks:
        rank.start()
    link.wait_ready(_WAIT_S)
    engine = Engine(config, link)
    engine.start()
    try:
        yield InProcess(engine)
    finally:
        engine.close()
        for rank in ranks:
            rank.join(_WAIT_S)
            assert not rank.is_alive()


def _axis_groups(layout: Layout, axis: str) -> dict[int, Group]:
    found: dict[int, Group] = {}
    for members in mesh.groups(layout, axis):
        made = thread_groups(len(members), axis) if len(members) > 1 else [SoloGroup(axis)]
        found.update(zip(members, made, strict=True))
    return found


def loaded(model: TinyModel, own: Shard, tp: Group, dtype: torch.dtype) -> Decoder:
    """One rank's part of `model`, read from its files."""
    decoder = Decoder(model.spec, own, tp, CpuAttention(), dtype)
    source = open_source(model.folder, model.spec)
    load(dict(decoder.named_parameters()), model.spec, own, source)
    source.close()
    return decoder


def _rank(
    model: TinyModel,
    layout: Layout,
    rank: int,
    axes: dict[str, dict[int, Group]],
    config: EngineConfig,
    address: str,
    dtype: torch.dtype,
) -> None:
    torch.set_num_threads(1)
    spec, own = model.spec, shards.shard(model.spec, layout, mesh.coords(layout, rank))
    tp, pp = axes["tp"][rank], axes["pp"][rank]
    decoder = loaded(model, own, tp, dtype)
    cache = KVCache(own.layers, len(own.kv_heads), config.num_blocks, config.block_size, spec.head_dim, dtype)
    runner = Runner(decoder, cache, pp, Sampler(tp, own.vocab, spec.vocab_size), spec.hidden_size)
    link = ZmqRankLink(address, rank, _TOKEN)
    try:
        while True:
            result = runner.step(link.receive_plan(_WAIT_S))
            if result is not None and tp.rank == 0:
                link.send_result(result)
    except LinkClosed:
        return
    except Exception as error:
        link.send_failure(repr(error))
        raise
    finally:
        link.close()
        tp.close()
        pp.close()
