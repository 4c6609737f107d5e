"""What is asked of `serve`, as far as it is judged before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.engine.config.balancing import Balancing
from placement.cost.memory import MemoryBudgetError
from placement.layout.layout import LayoutError
from placement.nodes.hardware import ClusterSpec, NodeSpec
from serve_app.deployment.replica_settings import replica_settings
from serve_app.deployment.settings import ArgumentError, ServeArgs, parse_args, read_api_keys

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


@pytest.fixture
def with_experts(tmp_path: Path) -> str:
    experts = {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | experts))
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


def test_experts_are_looked_at_as_asked(with_experts: str) -> None:
    usual = replica_settings(ServeArgs(model=with_experts, layout="tp=2,ep=2"), "cpu")
    assert (usual.rebalance_every, usual.rebalance_skew) == (None, None)
    balancing = Balancing.of(usual.spec, usual.layout, 4, usual.rebalance_every, usual.rebalance_skew)
    assert balancing is not None
    assert balancing.interval == 3000
    args = parse_args({"model": with_experts, "layout": "tp=2,ep=2", "rebalance_every": 0, "rebalance_skew": 0.7})
    asked = replica_settings(args, "cpu")
    assert (asked.rebalance_every, asked.rebalance_skew) == (0, 0.7)


@pytest.mark.parametrize(
    ("asked", "named"),
    [({"rebalance_every": -1}, "rebalance_every"), *(({"rebalance_skew": x}, "rebalance_skew") for x in (0, 1))],
)
def test_looks_that_mean_nothing_are_refused(asked: dict[str, float], named: str) -> None:
    with pytest.raises(ArgumentError, match=f"{named}: .*given: {asked[named]}"):
        parse_args(asked)


@pytest.mark.parametrize(
    "asked", [{"rebalance_every": 100}, {"rebalance_skew": 0.5}, {"rebalance_every": 9, "rebalance_skew": 0.5}]
)
@pytest.mark.parametrize(
    ("layout", "works"), [("", "attn_dp=2,ep=2"), ("tp=2", "tp=2,ep=2"), ("tp=4,moe_dp=2", "tp=4,ep=2,moe_dp=2")]
)
def test_balancing_without_ep_is_refused_with_what_would_work(
    asked: dict[str, float], layout: str, works: str, with_experts: str
) -> None:
    with pytest.raises(LayoutError, match=r"ep=1 .* Try layout") as refused:
        replica_settings(ServeArgs(model=with_experts, layout=layout, **asked), "cpu", machine(4, 24 * 10**9))
    assert all(f"{name}={value}" in str(refused.value) for name, value in asked.items())
    assert f"Try layout {works} or to leave" in str(refused.value)
    replica_settings(ServeArgs(model=with_experts, layout=works, **asked), "cpu", machine(4, 24 * 10**9))


def test_what_the_machine_cannot_hold_is_not_said_to_work(with_experts: str) -> None:
    with pytest.raises(LayoutError, match=r"ep=1 .* Try to leave it out\.$"):
        replica_settings(ServeArgs(model=with_experts, rebalance_every=9), "cpu", machine(1, 24 * 10**9))


def test_balancing_without_experts_is_refused_but_not_its_absence(model: str) -> None:
    with pytest.raises(LayoutError, match=r"rebalance_every=9 .* the model has none\. Try to leave it out\.$"):
        replica_settings(ServeArgs(model=model, layout="tp=2", rebalance_every=9), "cpu")
    assert replica_settings(ServeArgs(model=model, layout="tp=2", rebalance_every=0), "cpu").rebalance_every == 0


def test_a_layout_and_its_balancing_are_judged_at_once(with_experts: str) -> None:
    with pytest.raises(LayoutError, match=r"tp=5 is more than the 4 query heads(.|\n)*rebalance_every=9 would move experts"):
        replica_settings(ServeArgs(model=with_experts, layout="tp=5", rebalance_every=9), "cpu")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"disk_cache": ""}, r"^disk_cache: .*must name a directory.*given: ''\)$"),
        ({"disk_cache": " ", "disk_cache_bytes": "1GiB"}, r"^disk_cache: [^;]*; leave it out for none \(given: ' '\)$"),
        ({"disk_cache_bytes": "1GiB"}, r"^disk_cache_bytes: .*there is none.*given: '1GiB'"),
    ],
)
def test_a_directory_and_its_bound_go_together(asked: dict[str, str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_args(asked)


def test_a_directory_holds_at_least_a_block(model: str) -> None:
    block = 16 * 4 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, KV heads, values of each, bytes of each
    args = ServeArgs(model=model, layout="tp=2", dtype="float32", disk_cache="blocks")
    assert replica_settings(args, "cpu").disk_cache_bytes == 16 * 2**30
    assert replica_settings(args.model_copy(update={"disk_cache_bytes": block}), "cpu").disk_cache_bytes == block
    with pytest.raises(MemoryBudgetError, match=rf"disk_cache_bytes {block - 1:,} .* {block:,} bytes"):
        replica_settings(args.model_copy(update={"disk_cache_bytes": block - 1}), "cpu")


def test_no_more_host_memory_is_taken_than_there_is(model: str) -> None:
    args = ServeArgs(model=model, layout="tp=2", host_cache=12 * 10**9)
    assert replica_settings(args, "cpu", machine(2, 26 * 10**9)).host_cache == 12 * 10**9
    message = (
        r"host_cache 12,000,000,000 for each of 2 ranks is 24,000,000,000 bytes, more than the 20,000,000,000 .* 10,000,000,000"
    )
    with pytest.raises(MemoryBudgetError, match=message):
        replica_settings(args, "cpu", machine(2, 20 * 10**9))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_keys_of_a_file_from_any_editor(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n", encoding=encoding, newline="\r\n")
    assert read_api_keys(parse_args({"api_keys": ("own",), "api_keys_file": str(file)})) == ("own", "one", "two")


def test_yarn_allows_the_context_that_it_extends_to(tmp_path: Path) -> None:
    """max_position_embeddings states the trained length, as the cards of some models tell users to leave it."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 64, "rope_scaling": scaling}))
    asked = [replica_settings(ServeArgs(model=str(tmp_path), max_model_len=length), "cpu") for length in (None, 200)]
    assert [settings.max_model_len for settings in asked] == [256, 200]
    with pytest.raises(LayoutError, match=r"max_model_len 300 is longer than the 256 positions"):
        replica_settings(ServeArgs(model=str(tmp_path), max_model_len=300), "cpu")
