"""What is asked of `serve`, as far as it is judged before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from placement.hardware import ClusterSpec, NodeSpec
from placement.layout import LayoutError
from placement.memory import MemoryBudgetError
from serve_app.settings import ArgumentError, ServeArgs, parse_args, replica_settings

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def machine(slots: int, memory_bytes: int) -> ClusterSpec:
    return ClusterSpec(nodes=(NodeSpec(name="here", slots=slots, memory_bytes=memory_bytes),))


@pytest.mark.parametrize(
    ("text", "expected"), [("512M", 512 * 10**6), ("2GiB", 2**31), ("1.5KiB", 1536), ("1PiB", 2**50), ("4096", 4096), (7, 7)]
)
def test_bytes_have_units(text: object, expected: int) -> None:
    assert parse_args({"kv_bytes": text}).kv_bytes == expected


def test_bytes_that_cannot_be_read_name_the_units() -> None:
    with pytest.raises(ArgumentError, match=r"kv_bytes.*512MiB.*'abc'"):
        parse_args({"kv_bytes": "abc"})


def test_more_processes_than_the_machine_can_hold_are_refused(model: str) -> None:
    args = ServeArgs(model=model, layout="tp=4,pp=4,cp=4,replicas=4")
    with pytest.raises(MemoryBudgetError, match=r"256 ranks on node here: their processes alone take about 64,000,000,000"):
        replica_settings(args, "cpu", machine(256, 24 * 10**9))
    assert replica_settings(ServeArgs(model=model, layout="tp=4,pp=2"), "cpu", machine(8, 24 * 10**9)).kv_bytes


def test_a_small_cache_bounds_the_sequences(model: str) -> None:
    assert replica_settings(ServeArgs(model=model, kv_bytes=40 * 1024), "cpu").max_model_len < 512
    with pytest.raises(LayoutError, match=r"holds 0 tokens .* give more kv_bytes$"):
        replica_settings(ServeArgs(model=model, kv_bytes=1), "cpu")
