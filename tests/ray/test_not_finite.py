"""A model whose logits are not numbers: each request ends with one clear error, and the server lives on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.ray.server import serving
from tests.ray.streaming import Stream, body
from tests.support.models.tiny_models import tiny

pytestmark = pytest.mark.long

WAYS = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 1},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "logprobs": {"logprobs": 2},
}


@pytest.mark.parametrize(("value", "layout"), [(math.nan, "tp=2"), (3e38, "")])
def test_every_request_ends_with_one_error(tmp_path: Path, value: float, layout: str) -> None:
    """3e38 overflows."""
    with serving(spoiled(tmp_path, value), "--layout", layout, "--dtype", "float32", "--max-model-len", "64") as server:
        for way, more in WAYS.items():
            failed = server.client.post("/v1/completions", json=body([1, 2, 3], 4) | more)
            assert failed.status_code == 500, f"{way}: {failed.text}"
            assert "not finite" in failed.json()["error"]["message"], way
            chunks = Stream(server.url, body([1, 2, 3], 4) | more).finish().chunks
            assert ["not finite" in chunk.get("error", {}).get("message", "") for chunk in chunks] == [True], way
        assert server.health() == 200
        assert server.gauge("running") == 0
        assert server.gauge("total_blocks") == server.gauge("free_blocks") + server.gauge("cached_blocks")


def spoiled(folder: Path, value: float) -> str:
    """The tiny model with one weight of its last norm set to `value`."""
    source = tiny("llama3").folder
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    [weights] = source.glob("*.safetensors")
    tensors = load_file(weights)
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], value)
    save_file(tensors, folder / weights.name, {"format": "pt"})
    return str(folder)
