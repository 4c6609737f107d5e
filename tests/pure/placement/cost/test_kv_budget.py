"""How many bytes of KV a rank gets, how long sequences are with them, and how many blocks they are."""

from __future__ import annotations

import pytest

from placement.cost.kv_budget import (
    CPU_KV_BYTES,
    USUAL_CONTEXT,
    kv_blocks,
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
