"""KV blocks that outlive the server: everything is killed, and another layout goes on from the same directory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from placement.checkpoint.hf.safetensors_file import read_directory
from tests.ray.server import READY_S, Server, kill, ready, serving, start, wait_until
from tests.ray.streaming import body
from tests.support.models.tiny_models import tiny

PROMPTS = [[at, *range(1, 62), at] for at in range(4)]


def test_after_everything_was_killed_the_directory_serves_another_layout(tmp_path: Path) -> None:
    model, shared = str(tiny("llama3").folder), tmp_path / "blocks"
    options = ("--dtype", "float32", "--disk-cache", str(shared), "--host-cache", "64MiB")
    server = start(model, "--layout", "tp=2", *options, log=tmp_path / "log")
    try:
        wait_until(lambda: ready(server), READY_S, server.log.read_text)
        before = answers(server)
        assert server.gauge("tier_saved_blocks") >= 3 * len(PROMPTS)
        wait_until(lambda: len(list(shared.glob("*/??/*/l*"))) >= 6 * len(PROMPTS), 30, lambda: f"{list(shared.rglob('*'))}")
    finally:
        kill(server.process, server.mark)
    with serving(model, "--layout", "pp=2", *options) as again:
        assert answers(again) == before
        assert again.gauge("tier_found_tokens") == 48 * len(PROMPTS)
        assert again.gauge("tier_block_parts:tier=shared") > 0


@pytest.mark.long
def test_a_model_that_was_edited_between_two_starts_finds_no_blocks(tmp_path: Path) -> None:
    """One bit of one tensor, with the file's old time of change; set back, the model finds its blocks again."""
    shutil.copytree(tiny("llama3").folder, tmp_path / "model")
    file, options = tmp_path / "model" / "model.safetensors", ("--dtype", "float32", "--disk-cache", str(tmp_path / "blocks"))
    at = read_directory(file).tensors["model.layers.2.self_attn.k_proj.weight"].data.start + 403
    found = []
    for _ in range(3):
        with serving(str(tmp_path / "model"), *options) as server:
            answers(server)
            found.append(server.gauge("tier_found_tokens"))
        flip(file, at)
    assert found == [0, 0, 48 * len(PROMPTS)]


@pytest.mark.long
def test_ranks_that_come_back_with_edited_weights_find_no_blocks(tmp_path: Path) -> None:
    """The engine names blocks by the weights it started with, so the replica is replaced."""
    shutil.copytree(tiny("llama3").folder, tmp_path / "model")
    file, options = tmp_path / "model" / "model.safetensors", ("--dtype", "float32", "--disk-cache", str(tmp_path / "blocks"))
    with serving(str(tmp_path / "model"), *options) as server:
        answers(server)
        [before] = server.gauges()
        flip(file, read_directory(file).tensors["model.layers.2.self_attn.k_proj.weight"].data.start + 403)
        server.ranks()[0].kill()
        wait_until(lambda: ready(server) and server.gauges().keys() - {before}, READY_S, server.log.read_text)
        answers(server)
        [after] = server.gauges().keys() - {before}
        assert server.gauges()[after]["tier_saved_blocks"] >= 3 * len(PROMPTS)
        assert server.gauges()[after]["tier_found_tokens"] == 0


def flip(file: Path, at: int) -> None:
    """Change the sign of the float32 that ends at the byte `at`, in place, and restore the times that a user can set."""
    times, content = file.stat(), bytearray(file.read_bytes())
    content[at] ^= 0x80
    with file.open("r+b") as opened:
        opened.write(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def answers(server: Server) -> list[list[int]]:
    found = [server.post("/v1/completions", body(prompt, 6)) for prompt in PROMPTS]
    return [answer["choices"][0]["token_ids"] for answer in found]
