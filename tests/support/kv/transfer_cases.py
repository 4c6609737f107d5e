"""Caches of the ranks of a side, filled with values that say what they are, and endpoints that exchange them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from actors.kv_transfer.compatibility import Compatibility
from actors.kv_transfer.endpoint import CopyTarget, KVEndpoint, Sending
from actors.kv_transfer.nixl_transport import NixlTransport
from actors.kv_transfer.transport import Transport
from actors.model.kv.kv_cache import KVCache
from placement.layout.layout import Layout
from placement.model.spec import ModelSpec
from placement.ownership.handoff import Copy, Holding, Side, handoff, holdings
from placement.ownership.handoff_pages import PageTable
from tests.support.kv.handoff_cases import heads_model, latent_model

CASES: dict[str, tuple[str, str, str, int, int, int]] = {
    "heads split again": ("gqa", "tp=2", "tp=3,pp=2", 16, 32, 33),
    "one KV head on four": ("mqa", "tp=4,pp=2", "tp=3", 16, 16, 17),
    "positions split": ("gqa", "cp=2,tp=2", "cp=3", 32, 16, 200),
    "latents": ("mla", "tp=3", "tp=2,dcp=2,pp=2", 16, 32, 200),
    "dp-ranks": ("mha", "attn_dp=2,tp=2", "pp=3", 16, 16, 15),
    "uneven": ("gqa", "tp=2,tp_shares=2/1", "pp=2,stage_layers=3/1,tp=3", 16, 32, 1),
}
"""Model, prefill, decode, tokens of a page on each side, prompt length."""

OVER_NIXL = ("heads split again", "positions split", "latents")
"""Those that are tried between processes too: an agent of NIXL takes a while to make on a small machine."""


def model(name: str) -> ModelSpec:
    return {
        "gqa": heads_model(3, 2),
        "mha": heads_model(4, 1),
        "mqa": heads_model(1, 6),
        "mla": latent_model(),
    }[name]


def compatibility(spec: ModelSpec, **changes: object) -> Compatibility:
    return Compatibility.of(spec, "a" * 64, "float32", "test 1").model_copy(update=changes)


@dataclass
class Rank:
    """One rank of a side: what it keeps, its cache, and the pages of the one sequence."""

    held: Holding
    cache: KVCache
    table: PageTable

    @classmethod
    def of(cls, spec: ModelSpec, side: Side, held: Holding, tokens: int, seed: int) -> Rank:
        """Pages in any order. All ranks of an owner have the same ones, as they have in an engine."""
        drawn, blocks = random.Random(seed), -(-tokens // side.page_tokens)
        owners, pages = held.ownership.owners, [0] * blocks
        for owner in range(owners):
            own = range(owner, blocks, owners)
            for block, page in zip(own, drawn.sample(range(blocks + 2), len(own)), strict=True):
                pages[block] = page
        sizes = (held.layers, len(held.kv_heads), blocks + 2, side.page_tokens, spec.kv_dim)
        return cls(held, KVCache(*sizes, torch.float32, planes=spec.kv_planes), PageTable(held.ownership, pages))

    def true_values(self, layer: int, tokens: int) -> Tensor:
        """What this rank's pages of a layer hold of a sequence of `tokens`, like `KVCache.runs`; -1 where nothing."""
        runs = torch.full_like(self.cache.runs(layer), -1.0)
        own = self.table.ownership.blocks(list(self.table.pages))
        dims, planes = torch.arange(self.cache.head_dim) / 64, self.cache.planes
        for position in range(tokens):
            slot = self.table.ownership.slot(position, own)
            for plane in range(planes if slot >= 0 else 0):
                for index, head in enumerate(self.held.kv_heads):
                    runs[plane, index, slot] = ((layer * planes + plane) * 8 + head) * 256 + position + dims
        return runs

    def fill(self, tokens: int) -> None:
        """Hold the true values of `tokens` tokens; of none: -1 everywhere."""
        for layer in self.held.layers:
            self.cache.runs(layer).copy_(self.true_values(layer, tokens))

    def wrong(self, tokens: int) -> int:
        """How many values of all pages are not as they should be."""
        return sum(int((self.cache.runs(layer) != self.true_values(layer, tokens)).sum()) for layer in self.held.layers)


@dataclass(frozen=True)
class Case:
    """A hand-off to try."""

    spec: ModelSpec
    source: Side
    destination: Side
    tokens: int

    @classmethod
    def named(cls, name: str) -> Case:
        family, prefill, decode, page, other_page, tokens = CASES[name]
        source, destination = Layout.parse(prefill), Layout.parse(decode)
        return cls(model(family), Side(source, page, source.attn_dp - 1), Side(destination, other_page), tokens)

    @property
    def copies(self) -> list[Copy]:
        return handoff(self.spec, self.source, self.destination, range(self.tokens))

    def ranks(self, side: Side, seed: int) -> dict[int, Rank]:
        return {held.world_rank: Rank.of(self.spec, side, held, self.tokens, seed) for held in holdings(self.spec, side)}

    def writers(self) -> dict[int, Rank]:
        found = self.ranks(self.source, 1)
        for rank in found.values():
            rank.fill(self.tokens)
        return found

    def readers(self) -> dict[int, Rank]:
        found = self.ranks(self.destination, 2)
        for rank in found.values():
            rank.fill(0)
        return found


def endpoint(case: Case, rank: Rank, transport: Transport, staging_bytes: int) -> KVEndpoint:
    return KVEndpoint(transport, rank.cache, rank.held, compatibility(case.spec), staging_bytes)


def expect_all(case: Case, readers: Mapping[int, Rank], ends: Mapping[int, KVEndpoint]) -> list[CopyTarget]:
    """The readers' part: where each copy goes."""
    return [
        ends[copy.destination].expect(f"copy {index}", copy, readers[copy.destination].table)
        for index, copy in enumerate(case.copies)
    ]


def send_all(
    case: Case,
    writers: Mapping[int, Rank],
    ends: Mapping[int, KVEndpoint],
    reader_metadata: Mapping[int, bytes],
    tables: Mapping[int, PageTable],
    targets: Iterable[CopyTarget],
) -> list[Sending]:
    """The writers' part."""
    sendings = []
    for index, (copy, target) in enumerate(zip(case.copies, targets, strict=True)):
        end, own = ends[copy.source], writers[copy.source].table
        peer = end.connect(reader_metadata[copy.destination])
        sendings.append(end.send(peer, f"copy {index}", copy, own, target, tables[copy.destination]))
    return sendings


def wait_for_copies(case: Case, ends: Mapping[int, KVEndpoint], timeout_s: float = 30.0) -> list[str]:
    """Poll until every copy has arrived."""
    arrived: list[str] = []
    deadline = time.monotonic() + timeout_s
    while len(arrived) < len(case.copies):
        arrived += [name for end in ends.values() for name in end.poll()]
        assert time.monotonic() < deadline, f"{len(arrived)} of {len(case.copies)} copies after {timeout_s:g} s"
    return arrived


def read_over_nixl(pipe: Connection, names: list[str], staging_bytes: int) -> None:
    """A process with all readers of each case in turn: sends (reader metadata, tables, targets), then what it got."""
    torch.set_num_threads(1)
    for name in names:
        case = Case.named(name)
        readers = case.readers()
        ends = {at: endpoint(case, rank, NixlTransport(f"reader{at}"), staging_bytes) for at, rank in readers.items()}
        reader_metadata = {at: end.agent_metadata() for at, end in ends.items()}
        pages = {at: list(rank.table.pages) for at, rank in readers.items()}
        targets = [target.staged_at for target in expect_all(case, readers, ends)]
        pipe.send((reader_metadata, pages, targets))
        arrived = wait_for_copies(case, ends)
        wrong = sum(rank.wrong(case.tokens) for rank in readers.values())
        pipe.send((sorted(arrived), wrong, sum(end.num_stray for end in ends.values())))
        assert pipe.recv() == "closed"
        for end in ends.values():
            end.close()


def write_over_nixl(pipe: Connection, names: list[str]) -> None:
    """A process with all writers: takes what the readers say, sends the bytes it counted."""
    torch.set_num_threads(1)
    for name in names:
        case = Case.named(name)
        writers = case.writers()
        ends = {at: endpoint(case, rank, NixlTransport(f"writer{at}"), 1 << 20) for at, rank in writers.items()}
        reader_metadata, pages, targets = pipe.recv()
        owners = {held.world_rank: held.ownership for held in holdings(case.spec, case.destination)}
        tables = {at: PageTable(owners[at], found) for at, found in pages.items()}
        sendings = send_all(case, writers, ends, reader_metadata, tables, [CopyTarget(staged_at=at) for at in targets])
        deadline = time.monotonic() + 30
        while not all([sending.is_done() for sending in sendings]):
            assert time.monotonic() < deadline, "a transfer has not ended after 30 s"
        pipe.send({at: end.bytes_sent for at, end in ends.items()})
        assert pipe.recv() == "close"
        for end in ends.values():
            end.close()
        pipe.send("closed")
