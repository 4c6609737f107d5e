"""The digest of weight files: every byte of every tensor counts, layouts and files do not, and no stale hash is used."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from actors.model.checkpoint.hash_cache import FileIdentity, HashCache
from actors.model.checkpoint.weight_hasher import WeightHasher, whole_digest
from placement.checkpoint import header
from placement.checkpoint.header import read_tensors
from placement.layout.layout import Layout
from placement.model.digest import CHUNK_BYTES, model_digest
from placement.model.spec import ModelError
from tests.support.layout_draws import draw_layout
from tests.support.models.gguf_models import write_model
from tests.support.models.safetensors_files import as_bytes
from tests.support.models.specs import DENSE
from tests.support.models.tiny_models import TinyModel, tiny

NORM = "model.norm.weight"
NOTHING = HashCache(Path(os.devnull) / "cache")
"""A cache that keeps nothing."""


def digest(path: Path, cache: HashCache = NOTHING) -> str:
    return whole_digest(path, header.read(path), cache)


def wide() -> TinyModel:
    """A model whose rows consist of whole quantisation blocks of 32."""
    return tiny("llama2", hidden_size=64, num_attention_heads=4, intermediate_size=96, num_hidden_layers=2)


def copy_of(family: str, folder: Path, **changes: bool) -> Path:
    shutil.copytree(tiny(family, **changes).folder, folder)
    return folder


def flip(file: Path, at: int) -> None:
    """Change one bit, in place, and restore the times that a user can set."""
    times = file.stat()
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1]))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe", "gpt_oss", "deepseek_v3_moe"])
@pytest.mark.parametrize("tied", [False, True])
def test_ranks_of_any_layout_find_the_same_digest(family: str, tied: bool) -> None:
    model, draw = tiny(family, tied=tied), random.Random(family)
    expected = digest(model.folder)
    for _ in range(4):
        layout = draw_layout(draw, model.spec)
        shares = []
        for rank in range(layout.world):
            with WeightHasher(model.folder, model.spec, layout, rank, 1, NOTHING) as hasher:
                shares.append(hasher.finish())
        assert model_digest(model.spec, shares) == expected, layout


@pytest.mark.parametrize("kind", ["safetensors", "Q4_1"])
def test_every_byte_of_every_tensor_counts(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    if kind == "safetensors":
        path = copy_of("llama3", tmp_path / "it")
    else:
        write_model(path, wide(), kind)
    found, draw = {digest(path)}, random.Random(3)
    tensors = read_tensors(path, header.read(path)).tensors.values()
    for entry in tensors:
        for at in (entry.data.start, entry.data.stop - 1, draw.choice(entry.data)):
            flip(entry.file, at)
            found.add(digest(path))
            flip(entry.file, at)
    assert len(found) == 1 + 3 * len(tensors)


def sparse(file: Path, size: int) -> Path:
    """A model of one tensor of `size` bytes, which take no room on the disk."""
    header_bytes = as_bytes({"model.norm.weight": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}, 0)
    file.write_bytes(header_bytes)
    os.truncate(file, len(header_bytes) + size)
    return file


def test_tensors_of_many_chunks_are_hashed_to_the_last_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = CHUNK_BYTES + 4096
    file = sparse(tmp_path / "model.safetensors", size)
    monkeypatch.setattr("actors.model.checkpoint.weight_hasher.hash_shares", lambda spec, layout, sizes: [{NORM: [0, 1]}])
    start = file.stat().st_size - size
    found = {whole_digest(file, DENSE, NOTHING)}
    for at in (0, (1 << 20) - 1, 1 << 20, CHUNK_BYTES - 1, CHUNK_BYTES, size - 1):
        flip(file, start + at)
        found.add(whole_digest(file, DENSE, NOTHING))
    assert len(found) == 7


def test_what_is_stored_elsewhere_but_loaded_alike_is_the_same_model(tmp_path: Path) -> None:
    folder = copy_of("llama3", tmp_path / "it")
    expected, tensors = digest(folder), load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "whole.safetensors")
    half = dict(list(tensors.items())[::2])
    rest = {name: x for name, x in tensors.items() if name not in half}
    save_file(half, folder / "half.safetensors")
    save_file(rest | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, folder / "rest.safetensors")
    weight_map = dict.fromkeys(half, "half.safetensors") | dict.fromkeys(rest, "rest.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert digest(folder) == expected


def edited(tensors: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    query, key = "model.layers.1.self_attn.q_proj.weight", "model.layers.2.self_attn.q_proj.weight"
    changes = {
        "one value": {query: tensors[query].index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(0.5))},
        "two tensors exchanged": {query: tensors[key], key: tensors[query]},
        "rounded to bfloat16": {name: x.bfloat16().float() for name, x in tensors.items()},
        "stored as float64": {name: x.double() for name, x in tensors.items()},
        "merged with an adapter": {key: tensors[key] + 1e-3 * torch.ones(48, 2) @ torch.ones(2, 48)},
    }
    return tensors | changes[kind]


@pytest.mark.parametrize(
    "kind", ["one value", "two tensors exchanged", "rounded to bfloat16", "stored as float64", "merged with an adapter"]
)
def test_an_edited_model_is_another(kind: str, tmp_path: Path) -> None:
    folder = copy_of("llama3", tmp_path / "it")
    before = digest(folder)
    save_file(edited(load_file(folder / "model.safetensors"), kind), folder / "model.safetensors")
    assert digest(folder) != before


def test_another_quantisation_of_the_same_weights_is_another_model(tmp_path: Path) -> None:
    found = set()
    for kind in ("F32", "Q8_0", "Q4_0", "Q4_1"):
        write_model(tmp_path / f"{kind}.gguf", wide(), kind)
        found.add(digest(tmp_path / f"{kind}.gguf"))
    assert len(found) == 4


def test_a_restart_uses_the_hashes_that_are_kept(tmp_path: Path) -> None:
    folder, cache = copy_of("llama3", tmp_path / "it"), HashCache(tmp_path / "cache", settled_s=-1)
    expected = digest(folder, cache)
    assert digest(folder, cache) == expected
    kept = next((tmp_path / "cache").iterdir())
    entries = read_tensors(folder, header.read(folder)).tensors.values()
    runs = cache.known(FileIdentity.of((folder / "model.safetensors").stat()))
    assert sorted(runs) == sorted((entry.data.start, entry.data.stop) for entry in entries)
    kept.write_text(kept.read_text().replace("a", "b"))
    assert digest(folder, cache) != expected, "the kept hashes were not used"


@pytest.mark.parametrize("change", ["in place", "replaced", "replaced by a file of the same times"])
def test_a_changed_file_is_hashed_again(change: str, tmp_path: Path) -> None:
    folder, cache = copy_of("llama3", tmp_path / "it"), HashCache(tmp_path / "cache", settled_s=-1)
    file, other = folder / "model.safetensors", tmp_path / "other"
    before = digest(folder, cache)
    if change == "in place":
        flip(file, file.stat().st_size - 100)
    else:
        shutil.copy(file, other)
        flip(other, file.stat().st_size - 100)
        if change.endswith("times"):
            shutil.copystat(file, other)
        other.replace(file)
    after = digest(folder, cache)
    assert after != before
    assert after == digest(folder)


def test_hashes_of_a_file_that_has_just_been_changed_are_not_kept(tmp_path: Path) -> None:
    folder, cache = copy_of("llama3", tmp_path / "it"), HashCache(tmp_path / "cache")
    digest(folder, cache)
    assert not (tmp_path / "cache").exists()


def test_damaged_lines_of_the_cache_are_skipped(tmp_path: Path) -> None:
    folder, cache = copy_of("llama3", tmp_path / "it"), HashCache(tmp_path / "cache", settled_s=-1)
    expected = digest(folder, cache)
    kept = next((tmp_path / "cache").iterdir())
    lines = kept.read_text().splitlines()
    kept.write_bytes(b"\xff\x00\n" + "\n".join([lines[0][:-1], f"{lines[1]}0", "", *lines[2:-1], lines[-1][:30]]).encode())
    assert digest(folder, cache) == expected
    assert len(cache.known(FileIdentity.of((folder / "model.safetensors").stat()))) > len(lines) - 4


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = copy_of("llama3", tmp_path / "it")
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert digest(folder, HashCache(tmp_path / "file" / "cache", settled_s=-1)) == digest(folder)
    assert "every start computes them" in caplog.text


def test_ranks_that_add_at_once_lose_nothing(tmp_path: Path) -> None:
    cache, identity = HashCache(tmp_path), FileIdentity(1, 2, 3, 4, 5)
    parts = [{(at, at + 1): bytes([at] * 32) for at in range(rank, 240, 8)} for rank in range(8)]
    threads = [threading.Thread(target=cache.add, args=(identity, part)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.known(identity) == {run: content for part in parts for run, content in part.items()}


def test_the_cache_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.model.checkpoint.hash_cache._MOST_FILES", 3)
    cache = HashCache(tmp_path)
    for at in range(5):
        cache.add(FileIdentity(at, 0, 0, 0, 0), {(0, 1): bytes(32)})
        os.utime(sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime)[-1], (at, at))
    kept = [bool(cache.known(FileIdentity(at, 0, 0, 0, 0))) for at in range(5)]
    assert (kept[0], kept[4], sum(kept)) == (False, True, 3)


@pytest.mark.parametrize("change", ["in place", "replaced", "removed", "shortened"])
def test_a_file_that_changes_while_it_is_loaded_is_refused(change: str, tmp_path: Path) -> None:
    folder = copy_of("llama3", tmp_path / "it")
    file = folder / "model.safetensors"
    with WeightHasher(folder, tiny("llama3").spec, Layout(), 0, 1, NOTHING) as hasher:
        if change == "in place":
            flip(file, 3000)
        elif change == "replaced":
            shutil.copy(file, tmp_path / "other")
            (tmp_path / "other").replace(file)
        elif change == "removed":
            file.unlink()
        else:
            os.truncate(file, file.stat().st_size - 1000)
        with pytest.raises(ModelError, match=rf"{file} was (changed|shortened) while it was loaded"):
            hasher.finish()


def test_a_checkpoint_that_lacks_a_tensor_names_it(tmp_path: Path) -> None:
    folder = copy_of("llama3", tmp_path / "it")
    tensors = load_file(folder / "model.safetensors")
    del tensors[NORM]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{folder}: tensor {NORM} is missing"):
        digest(folder)
