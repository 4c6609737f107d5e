"""Values that are shorter than keys: in the kernels, in the cache, on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from actors.model.attention.capped import capped_attention
from actors.model.attention.cpu.flash import flash_with_lse
from actors.model.attention.cuda.choose import choose_cuda
from actors.model.attention.cuda.gather import GatherAttention
from actors.model.attention.cuda.partial_kernels import EagerPartial
from actors.model.attention.eager import eager_attention
from actors.model.attention.params import AttentionParams
from actors.model.kv.kv_cache import KVCache
from actors.model.kv.kv_caches import KVCaches
from actors.model.kv.pages import source
from placement.cost.memory import kv_bytes_per_token
from placement.layout.layout import Layout
from placement.layout.mesh import coords_of
from placement.model.spec import ModelError
from placement.ownership.context import BLOCK_TOKENS
from placement.ownership.shards import shard
from tests.cpu.checkpoint.test_experts import saved_as
from tests.cpu.model.test_families import check, sequences_of
from tests.support.models.checkpoint_checks import load_rank
from tests.support.models.tiny_decoder import mixed, run
from tests.support.models.tiny_models import tiny

torch.set_num_threads(1)


def inputs(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(queries + keys)
    return torch.randn(2, 4, queries, 12), torch.randn(2, 2, keys, 12), torch.randn(2, 2, keys, 8)


def reference(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    scores = q @ k.repeat_interleave(2, 1).mT * 0.3
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ v.repeat_interleave(2, 1)


@pytest.mark.parametrize(("queries", "keys", "causal"), [(1, 7, False), (5, 5, True), (3, 9, False)])
def test_kernels_give_as_many_dimensions_as_values_have(queries: int, keys: int, causal: bool) -> None:
    q, k, v = inputs(queries, keys)
    for kernel in (flash_with_lse, eager_attention):
        out, lse = kernel(q, k, v, 0.3, causal=causal)
        torch.testing.assert_close(out, reference(q, k, v, causal), atol=1e-5, rtol=1e-5)
        assert lse.shape == (2, 4, queries)
    capped, _ = flash_with_lse(q, k, v, 0.3, causal=causal, softcap=2.0)
    padded = torch.nn.functional.pad(v, (0, 4))
    assert torch.equal(capped, capped_attention(q, k, padded, 0.3, 2.0, causal)[0][..., :8])


def test_values_longer_than_keys_are_refused() -> None:
    q, k, v = inputs(2, 2)
    with pytest.raises(ValueError, match="attention inputs clash"):
        flash_with_lse(q[..., :8], k[..., :8], torch.cat((v, v), -1), 1.0)


def test_nothing_seen_is_nothing() -> None:
    q, k, v = inputs(2, 2)
    out, lse = flash_with_lse(q, k[:, :, :0], v[:, :, :0], 1.0)
    assert out.shape == (2, 4, 2, 8)
    assert not out.any()
    assert torch.isneginf(lse).all()


@pytest.mark.parametrize("table", [[4, 5, 6], [6, 1, 3]])
def test_pages_of_unlike_keys_and_values(table: list[int]) -> None:
    cache = KVCache(range(3, 4), 2, 8, 4, 12, torch.float32, value_dim=8)
    k, v = torch.randn(10, 2, 12), torch.randn(10, 2, 8)
    slots = torch.tensor([table[at // 4] * 4 + at % 4 for at in range(10)])
    cache.write_kv(3, slots, cache.joined(k, v))
    keys, values = source(cache, table, 2, 10).read(cache, 3)
    assert torch.equal(keys[0], k[2:].transpose(0, 1))
    assert torch.equal(values[0], v[2:].transpose(0, 1))
    assert cache.nbytes == 8 * 4 * 2 * (12 + 8) * 4
    with pytest.raises(ValueError, match="keys of size 12 and values of size 8"):
        cache.pages(3)


@pytest.mark.parametrize("text", ["tp=1", "tp=3,pp=2", "tp=8"])
def test_pages_take_what_was_said(text: str) -> None:
    spec, layout = tiny("mimo_v2").spec, Layout.parse(text)
    for rank in range(layout.world):
        own = shard(spec, layout, coords_of(layout, rank))
        caches = KVCaches.of(spec, own, 5, BLOCK_TOKENS, torch.float32)
        assert caches.nbytes == 5 * BLOCK_TOKENS * kv_bytes_per_token(spec, own, "float32")
        assert sorted(layer for part in caches.parts.values() for layer in part.layers) == list(own.layers)


def test_attention_over_gathered_pages_equals_transformers() -> None:
    """The fall-back of CUDA, and what it is chosen for."""
    model, sequences = tiny("mimo_v2"), sequences_of(5, 40)
    logits = run(model, Layout(tp=2), sequences, mixed(sequences, 1), make_attention=GatherAttention)
    for tokens, found in zip(sequences, logits, strict=True):
        torch.testing.assert_close(found, model.logits(tokens), atol=1e-4, rtol=1e-4)
    assert type(choose_cuda(torch.bfloat16, 16, head_dim=192, value_dim=128)) is GatherAttention
    q, k, v = inputs(3, 3)
    out, _ = EagerPartial().dense(q, k, v, AttentionParams(0, 0.3), causal=True)
    torch.testing.assert_close(out, reference(q, k, v, True), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "kinds", [["sliding_attention"] * 3, ["full_attention"] * 3, ["sliding_attention", "full_attention"] * 2]
)
def test_layers_in_any_order_equal_transformers(kinds: list[str]) -> None:
    sequences = sequences_of(3, 21)
    check(tiny("mimo_v2", num_hidden_layers=len(kinds), layer_types=tuple(kinds)), sequences, mixed(sequences, 4))


def test_layers_that_guess_further_tokens_are_left_unread(tmp_path: Path) -> None:
    model = tiny("mimo_v2")
    weights = load_file(model.folder / "model.safetensors")
    assert "model.layers.1.self_attn.attention_sink_bias" in weights
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in weights
    saved_as(model, tmp_path, {**weights, "model.mtp.layers.0.eh_proj.weight": torch.zeros(2, 2)})
    load_rank(tmp_path, model.spec, Layout(), 0)
    saved_as(model, tmp_path, {**weights, "model.mpt.layers.0.eh_proj.weight": torch.zeros(2, 2)})
    with pytest.raises(ModelError, match="1 tensors that a mimo_v2_flash model"):
        load_rank(tmp_path, model.spec, Layout(), 0)
