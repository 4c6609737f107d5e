"""Engines whose blocks outlive the device: what was computed once is fetched, and no token changes."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.engine.config.engine_config import EngineConfig, OffloadConfig
from actors.engine.config.stats import EngineStats
from actors.kv_offload.block_part import KVFormat
from actors.kv_offload.offload_worker import KVOffloadWorker
from actors.model.checkpoint.hash_cache import HashCache
from actors.model.checkpoint.weight_hasher import whole_digest
from actors.rank.assembly import Parts
from actors.wire.requests import GenerateRequest, SamplingParams, TokenEvent
from actors.wire.tier_config import TierConfig
from placement.checkpoint import header
from placement.layout.layout import Layout
from tests.support.inprocess import InProcess, in_process
from tests.support.long_cases import long
from tests.support.models.tiny_models import TinyModel, tiny

BLOCK = 4


def request(name: str, prompt: list[int], max_tokens: int = 6) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt=prompt, max_tokens=max_tokens, sampling=SamplingParams(temperature=0.0))


def config(blocks: int) -> EngineConfig:
    return EngineConfig(block_size=BLOCK, num_blocks=blocks, max_model_len=128, max_batch_tokens=64, max_sequences=8)


def tiered(
    model: TinyModel, layout: str, blocks: int, settings: TierConfig, digest: str = "a" * 64
) -> tuple[EngineConfig, Callable[[Parts], Parts]]:
    parsed = Layout.parse(layout)
    kv_format = KVFormat.of(model.spec, digest, "float32", BLOCK)
    offload = OffloadConfig(tiers=settings, layout=parsed, kv_format=kv_format, block_bytes=4096)

    def attach(parts: Parts) -> Parts:
        return replace(parts, kv_offload=KVOffloadWorker(parts.config, parts.identity, parts.cache, settings, digest))

    return config(blocks).model_copy(update={"offload": offload, "kv_owners": parsed.kv_owners}), attach


def run(
    model: TinyModel, layout: str, engine: EngineConfig, attach: Callable[[Parts], Parts], work: Callable[[InProcess], None]
) -> EngineStats:
    with in_process(model, layout, engine, torch.float32, attach) as replica:
        work(replica)
        stats = replica.engine.stats()
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks, "blocks did not come back"
    return stats


def answers(model: TinyModel, prompts: list[list[int]]) -> list[list[int]]:
    found: list[list[int]] = []

    def work(replica: InProcess) -> None:
        found.extend(replica.run(request(str(at), prompt)).tokens for at, prompt in enumerate(prompts))

    run(model, "", config(400), lambda parts: parts, work)
    return found


def prompts(seed: int, count: int, length: int = 41) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(100) for _ in range(length)] for _ in range(count)]


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama3", "tp=3"),
        ("llama3", "attn_dp=2"),
        *long(("llama3", "pp=2,cp=2"), ("llama3", "tp=4,dcp=2"), ("deepseek_v3_moe", "tp=2")),
    ],
)
def test_what_the_device_gave_up_comes_back_from_host_memory(family: str, layout: str) -> None:
    model, texts = tiny(family), prompts(1, 12)
    expected = answers(model, texts)
    engine, attach = tiered(model, layout, 26, TierConfig(host_cache=64 << 20))

    def work(replica: InProcess) -> None:
        for turn in range(2):
            events = [replica.submit(request(f"{turn}-{at}", text)) for at, text in enumerate(texts)]
            done = [replica.finish(each) for each in events]
            assert [event.tokens for event in done] == expected
        assert sum(event.cached_tokens for event in done) >= least

    # Of 12 x 32 tokens in whole blocks; a DP rank that takes another prompt than before finds it in no tier of its own.
    least = 100 if "attn_dp" in layout else 300
    stats = run(model, layout, engine, attach, work)
    assert stats.tier_found_tokens >= least * 2 // 3
    assert stats.tier_hits["host"] > 0
    assert "shared" not in stats.tier_hits


def test_a_directory_serves_another_layout_after_a_restart(tmp_path: Path) -> None:
    model, texts = tiny("llama3"), prompts(2, 4)
    expected = answers(model, texts)
    settings = TierConfig(disk_cache=tmp_path)

    def work(replica: InProcess) -> None:
        assert [replica.run(request(str(at), text)).tokens for at, text in enumerate(texts)] == expected

    first = run(model, "tp=2", *tiered(model, "tp=2", 100, settings), work)
    second = run(model, "pp=3", *tiered(model, "pp=3", 100, settings), work)
    assert first.tier_found_tokens == 0
    assert second.tier_found_tokens == len(texts) * 40
    assert second.tier_hits["shared"] > 0
    damaged = next(path for path in tmp_path.glob("*/??/*/*") if path.is_file())
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(bytes(content))
    third = run(model, "tp=2", *tiered(model, "tp=2", 100, settings), work)
    assert third.tier_found_tokens < second.tier_found_tokens
    fourth = run(model, "tp=2", *tiered(model, "tp=2", 100, settings), work)
    assert fourth.tier_found_tokens == second.tier_found_tokens, "what was damaged was not put away again"


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    texts = prompts(3, 2)
    for digest in ("c" * 64, "d" * 64):
        settings = TierConfig(disk_cache=tmp_path)

        def work(replica: InProcess) -> None:
            for at, text in enumerate(texts):
                replica.run(request(str(at), text))

        stats = run(tiny("llama3"), "", *tiered(tiny("llama3"), "", 100, settings, digest), work)
        assert stats.tier_found_tokens == 0


def test_a_model_with_one_edited_value_finds_nothing_of_the_other(tmp_path: Path) -> None:
    """With the digests that the ranks compute; the edited model gets its own answers, and the unedited one still finds its
    blocks."""
    model, texts, settings = tiny("llama3"), prompts(6, 2), TierConfig(disk_cache=tmp_path / "blocks")
    shutil.copytree(model.folder, tmp_path / "edited")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(model.folder / "model.safetensors")
    tensors[name][20, 30] += 0.5
    save_file(tensors, tmp_path / "edited" / "model.safetensors")
    edited = replace(model, folder=tmp_path / "edited")
    found: dict[str, int] = {}
    for turn, each in (("first", model), ("edited", edited), ("first again", model), ("edited again", edited)):
        digest = whole_digest(each.folder, header.read(each.folder), HashCache(tmp_path / "hashes"))
        expected = answers(each, texts)

        def work(replica: InProcess, expected: list[list[int]] = expected) -> None:
            assert [replica.run(request(str(at), text)).tokens for at, text in enumerate(texts)] == expected

        found[turn] = run(each, "", *tiered(each, "", 100, settings, digest), work).tier_found_tokens
    assert found == {"first": 0, "edited": 0, "first again": 80, "edited again": 80}


@pytest.mark.long
def test_cancelled_while_their_blocks_are_fetched(tmp_path: Path) -> None:
    model, texts = tiny("llama3"), prompts(4, 30)
    expected = answers(model, texts)
    settings = TierConfig(host_cache=64 << 20, disk_cache=tmp_path)
    draw = random.Random(5)

    def work(replica: InProcess) -> None:
        for turn in range(4):
            waiting = [(at, replica.submit(request(f"{turn}-{at}", text))) for at, text in enumerate(texts)]
            for at, _ in waiting:
                if draw.random() < 0.3:
                    replica.engine.cancel(f"{turn}-{at}")
            for at, events in waiting:
                event: TokenEvent = replica.finish(events)
                assert event.finish in ("length", "abort")
                assert event.tokens == expected[at][: len(event.tokens)]

    stats = run(model, "tp=2", *tiered(model, "tp=2", 30, settings), work)
    assert stats.tier_found_tokens > 0
    assert stats.aborts > 10
