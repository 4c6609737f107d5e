"""How many bytes of KV a rank gets, how long sequences are with them, and how many blocks they are."""

from __future__ import annotations

import pytest

from placement.cost.kv_budget import (
    CPU_KV_BYTES,
    USUAL_CONTEXT,
    host_bytes,
    kv_blocks,
    length_within,
    longest_sequence,
    rank_kv_bytes,
    share_of_node,
    usual_length,
)
from placement.cost.memory import MemoryBudgetError, RankMemory
from placement.layout.layout import Layout, LayoutError
from placement.nodes.hardware import ClusterSpec, NodeSpec

RANK = RankMemory(0, weight_bytes=1000, kv_bytes_per_token=10)
"""A block of 16 tokens takes 160 bytes."""


def test_the_usual_length_is_the_models_own_where_that_is_shorter() -> None:
    assert usual_length(512) == 512
    assert usual_length(1 << 20) == USUAL_CONTEXT
    assert usual_length(1 << 20, asked=9000) == 9000
    with pytest.raises(LayoutError, match="max_model_len 600 is longer than the 512 positions"):
        usual_length(512, asked=600)


def test_kv_bytes_bound_the_longest_sequence_unless_one_was_asked_for() -> None:
    assert longest_sequence([RANK], 512, asked=None, kv_bytes=None) == 512
    assert longest_sequence([RANK], 512, asked=None, kv_bytes=3 * 160) == 48
    assert longest_sequence([RANK], 512, asked=40, kv_bytes=3 * 160) == 40
    with pytest.raises(LayoutError, match=r"holds 48 tokens .* fewer than max_model_len 49: .* or max_model_len 48 or less"):
        longest_sequence([RANK], 512, asked=49, kv_bytes=3 * 160)


def test_a_share_is_that_of_the_fullest_node() -> None:
    nodes = (NodeSpec(name="a", slots=2, memory_bytes=4 * 10**9), NodeSpec(name="b", slots=4, memory_bytes=4 * 10**9))
    assert share_of_node(ClusterSpec(nodes=nodes), 3, Layout()) == 4 * 10**9 // 3 - 250_000_000
    assert share_of_node(ClusterSpec(nodes=(NodeSpec(name="a", slots=2),)), 2, Layout()) is None


def test_the_kv_cache_in_host_memory_is_part_of_a_rank_s_share() -> None:
    cluster = ClusterSpec(nodes=(NodeSpec(name="a", slots=2, memory_bytes=4 * 10**9),))
    assert share_of_node(cluster, 2, Layout(), 10**9) == 10**9 - 250_000_000
    with pytest.raises(
        MemoryBudgetError, match=r"host_cache 1,750,000,000 for each of 2 ranks .* take less than 1,750,000,000"
    ):
        share_of_node(cluster, 2, Layout(), 1_750_000_000)
    with pytest.raises(MemoryBudgetError, match="their processes alone"):
        share_of_node(cluster.model_copy(update={"nodes": (NodeSpec(name="a", slots=9, memory_bytes=10**9),)}), 9, Layout(), 1)


def test_sequences_are_shortened_to_what_fits_unless_that_is_very_short() -> None:
    assert length_within([RANK], 1000 + 200 * 160, 8192) == 3200
    assert length_within([RANK], 1000 + 200 * 160, 3000) == 3000
    assert length_within([RANK, RANK], 1000 + 63 * 160, 8192) == 8192  # 1,008 tokens: it is refused later
    assert length_within([RANK], 10, 512) == 512


def test_host_memory_of_a_rank_has_weights_and_kv_only_on_a_cpu() -> None:
    assert host_bytes(RANK, "cpu", 500, length=16, max_sequences=64, host_cache=7) == 250_000_000 + 7 + 1000 + 500
    assert host_bytes(RANK, "cpu", None, length=16, max_sequences=2, host_cache=0) == 250_000_000 + 1000 + 320
    assert host_bytes(RANK, "cuda", 500, length=16, max_sequences=64, host_cache=7) == 250_000_000 + 7


def test_kv_bytes_are_as_asked_or_what_is_left_beside_the_weights() -> None:
    assert rank_kv_bytes([RANK], share=3000, asked=None, length=16) == 2000
    assert rank_kv_bytes([RANK], share=4 * CPU_KV_BYTES, asked=None, length=16) == CPU_KV_BYTES
    assert rank_kv_bytes([RANK], share=3000, asked=500, length=16) == 500
    with pytest.raises(MemoryBudgetError, match="kv_bytes 2,001 is more than the 2,000 bytes"):
        rank_kv_bytes([RANK], share=3000, asked=2001, length=16)


def test_blocks_are_those_of_the_tightest_device_and_no_more_than_can_be_filled() -> None:
    assert kv_blocks([RANK], 7 * 160, [], length=32, max_sequences=64) == 7
    assert kv_blocks([RANK], 7 * 160, [], length=32, max_sequences=3) == 6
    assert kv_blocks([RANK, RANK], None, [1600, 3200], length=32, max_sequences=64) == 9
    assert kv_blocks([RANK], None, [], length=32, max_sequences=64) == 128
    with pytest.raises(MemoryBudgetError):
        kv_blocks([RANK], 160, [], length=32, max_sequences=64)
