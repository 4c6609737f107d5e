"""A whole replica in one process: the real engine, link, runners and model, with the ranks as threads."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from actors.engine.config.engine_config import EngineConfig
from actors.engine.engine import Engine
from actors.engine.link.zmq_link import ZmqEngineLink, ZmqRankLink
from actors.groups.solo import SoloGroup
from actors.model.decoder import Decoder
from actors.rank.assembly import DTYPES, Parts, identity_of, load_decoder
from actors.rank.threads import start_ranks
from actors.wire.rank_config import RankConfig
from actors.wire.requests import GenerateRequest, TokenEvent
from placement.layout import mesh
from placement.layout.layout import Layout
from placement.model.spec import DType
from tests.support.models.tiny_models import SavedModel

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
def in_process(
    model: SavedModel,
    layout: str,
    config: EngineConfig,
    dtype: torch.dtype = torch.float32,
    attach: Callable[[Parts], Parts] = lambda parts: parts,
) -> Iterator[InProcess]:
    """A running replica of `model` under `layout`, its plans on ZeroMQ as they would be between processes.

    `attach`: see `start_ranks`.
    """
    parsed = Layout.parse(layout)
    link = ZmqEngineLink(parsed.world, mesh.output_ranks(parsed), _TOKEN)
    ranks = start_ranks(
        rank_config(model, parsed, dtype, config.block_size),
        config.num_blocks,
        lambda rank: ZmqRankLink(link.address, rank, _TOKEN),
        attach,
    )
    link.wait_ready(_WAIT_S)
    engine = Engine(config.model_copy(update={"stages": parsed.pp, "dp_size": parsed.attn_dp}), link)
    engine.start()
    try:
        yield InProcess(engine)
    finally:
        engine.close()
        for rank in ranks:
            rank.join(_WAIT_S)
            assert not rank.is_alive()


def rank_config(model: SavedModel, layout: Layout, dtype: torch.dtype = torch.float32, block_size: int = 16) -> RankConfig:
    """Rank 0 of `model` under `layout`, on this machine's CPU with one thread."""
    name: DType = next(name for name, each in DTYPES.items() if each is dtype)
    return RankConfig(
        world_rank=0,
        layout=layout,
        spec=model.spec,
        model_path=str(model.folder),
        device="cpu",
        dtype=name,
        block_size=block_size,
        threads_per_rank=1,
    )


def whole_decoder(model: SavedModel, dtype: torch.dtype) -> Decoder:
    """All of `model` on one rank, read from its files."""
    config = rank_config(model, Layout(), dtype)
    return load_decoder(config, identity_of(config), {axis: SoloGroup(axis) for axis in mesh.talking_axes(model.spec)})
