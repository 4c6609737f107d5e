"""Parameter counts, weight and KV bytes of a rank, and the blocks that fit."""

from __future__ import annotations

import pytest

from placement.cost.memory import (
    MemoryBudgetError,
    RankMemory,
    num_blocks,
    parameter_count,
    rank_memories,
    slot_bytes,
)
from placement.layout.layout import Layout, LayoutError
from placement.model.spec import ModelSpec
from placement.nodes.hardware import ClusterSpec, NodeSpec
from placement.ownership.context import BLOCK_TOKENS


def shape(hidden: int, layers: int, heads: tuple[int, int, int], wide: int, vocab: int, **changes: object) -> ModelSpec:
    values = {
        "family": "llama",
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads[0],
        "num_kv_heads": heads[1],
        "head_dim": heads[2],
        "intermediate_size": wide,
        "vocab_size": vocab,
        "max_position": 4096,
        "norm_eps": 1e-6,
        "windows": (None,) * layers,
        **changes,
    }
    return ModelSpec.model_validate(values)


QWEN3_4B = shape(2560, 36, (32, 8, 128), 9728, 151936, qk_norm="head", tie_embeddings=True)
LLAMA_70B = shape(8192, 80, (64, 8, 128), 28672, 128256)
SMOLLM2 = shape(576, 30, (9, 3, 64), 1536, 49152, tie_embeddings=True)


def test_parameter_counts() -> None:
    assert parameter_count(SMOLLM2) == 134_515_008
    assert parameter_count(QWEN3_4B) == 4_022_468_096
    assert parameter_count(QWEN3_4B.model_copy(update={"tie_embeddings": False})) == 4_411_424_256
    assert parameter_count(LLAMA_70B) * 2 == pytest.approx(141.1e9, rel=1e-3)


def test_padding_is_held_but_is_no_parameter() -> None:
    model = shape(8, 1, (2, 2, 4), 16, 101, dtype="float32")
    [rank] = rank_memories(model, Layout())
    assert rank.weight_bytes == 4 * (parameter_count(model) + 2 * 3 * 8)


@pytest.mark.parametrize(
    ("model", "tp", "expected"),
    [(QWEN3_4B, 1, 147_456), (LLAMA_70B, 1, 327_680), (LLAMA_70B, 8, 40_960), (LLAMA_70B, 16, 40_960)],
)
def test_kv_bytes_per_token(model: ModelSpec, tp: int, expected: int) -> None:
    assert {rank.kv_bytes_per_token for rank in rank_memories(model, Layout(tp=tp))} == {expected}


def test_uneven_ranks_and_stages_each_have_their_own_numbers() -> None:
    ranks = rank_memories(SMOLLM2, Layout(tp=2, pp=4))
    assert [rank.kv_bytes_per_token for rank in ranks] == [
        2 * layers * kv_heads * 64 * 2 for layers in (9, 10, 9, 2) for kv_heads in (2, 1)
    ]


def test_the_type_of_weights_and_cache_may_be_chosen() -> None:
    [plain], [wide], [mixed] = (
        rank_memories(SMOLLM2, Layout()),
        rank_memories(SMOLLM2, Layout(), "float32"),
        rank_memories(SMOLLM2, Layout(), "float32", "bfloat16"),
    )
    assert (wide.weight_bytes, wide.kv_bytes_per_token) == (2 * plain.weight_bytes, 2 * plain.kv_bytes_per_token)
    assert (mixed.weight_bytes, mixed.kv_bytes_per_token) == (wide.weight_bytes, plain.kv_bytes_per_token)


def test_all_ranks_have_the_blocks_of_the_tightest() -> None:
    ranks = [RankMemory(0, 1000, 10), RankMemory(1, 600, 20)]
    assert BLOCK_TOKENS == 16
    assert num_blocks(ranks, 1000 + 160 * 7 + 159, max_length=80) == 5
    assert num_blocks(ranks, [1000 + 160 * 3, 600 + 320 * 9], max_length=48) == 3


def test_weights_that_do_not_fit_are_refused_with_the_numbers() -> None:
    with pytest.raises(MemoryBudgetError) as refused:
        num_blocks([RankMemory(0, 1000, 10), RankMemory(1, 2000, 10)], 1500, max_length=100)
    text = str(refused.value)
    assert isinstance(refused.value, LayoutError)
    parts = [
        "world rank 1",
        "1,500 bytes",
        "weights take 2,000",
        "100 tokens",
        "7 KV blocks",
        f"{2000 + 7 * 160:,} bytes",
        "tp or pp",
    ]
    assert all(part in text for part in parts)
    assert "at most" not in text


def test_a_cache_too_small_for_one_sequence_is_refused_and_names_the_length_that_fits() -> None:
    rank = RankMemory(0, 1000, 10)
    assert num_blocks([rank], 1000 + 7 * 160, max_length=112) == 7
    with pytest.raises(MemoryBudgetError, match=r"at most 112 tokens.*give it 2,280 bytes"):
        num_blocks([rank], 1000 + 7 * 160, max_length=113)


def test_a_slot_can_count_on_the_smallest_share() -> None:
    nodes = (
        NodeSpec(name="a", slots=2, memory_bytes=100),
        NodeSpec(name="b", slots=4, memory_bytes=120),
        NodeSpec(name="c", slots=0, memory_bytes=1),
        NodeSpec(name="d", slots=1),
    )
    assert slot_bytes(ClusterSpec(nodes=nodes)) == 30
    assert slot_bytes(ClusterSpec(nodes=nodes[3:])) is None


def test_a_context_of_every_owners_pages_fits() -> None:
    """Two owners with 7 blocks each hold a sequence of 14 blocks."""
    rank = RankMemory(0, 1000, 10, kv_owners=2)
    assert num_blocks([rank], 1000 + 7 * 160, max_length=224) == 7
    assert rank.tokens_in(7 * 160) == 224
    with pytest.raises(MemoryBudgetError, match=r"its share \(1 of 2\) of one sequence.*at most 224 tokens"):
        num_blocks([rank], 1000 + 7 * 160, max_length=225)


def test_context_parallelism_leaves_the_bytes_of_a_token_where_it_lies() -> None:
    plain, spread = (rank_memories(LLAMA_70B, Layout.parse(text)) for text in ("", "cp=2"))
    assert [rank.kv_bytes_per_token for rank in spread] == [plain[0].kv_bytes_per_token] * 2
    assert [rank.kv_owners for rank in spread] == [2, 2]
