"""The attention seam: guards of the CPU operator, merging, page sources, buckets, and the adapters of CUDA kernels."""

from __future__ import annotations

import inspect
import random
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.model.attention.cpu.backend import CpuAttention
from actors.model.attention.cpu.decode import bucketed
from actors.model.attention.cpu.flash import flash, flash_with_lse
from actors.model.attention.cuda.choose import choose_cuda
from actors.model.attention.cuda.gather import GatherAttention
from actors.model.attention.decode_row import decode_rows
from actors.model.attention.merge import merge
from actors.model.attention.params import AttentionParams
from actors.model.attention_selection import choose
from actors.model.kv.kv_cache import KVCache
from actors.model.kv.pages import Gather, Run, source
from actors.model.step.batch import Batch
from placement.layout.layout import Layout
from tests.support.models.tiny_decoder import batch_of, chunked, mixed, run
from tests.support.models.tiny_models import tiny

torch.set_num_threads(1)

INF = float("inf")


def qkv(batch: int, q_heads: int, kv_heads: int, queries: int, keys: int, dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return (
        torch.randn(batch, q_heads, queries, dim),
        torch.randn(batch, kv_heads, keys, dim),
        torch.randn(batch, kv_heads, keys, dim),
    )


# --- the one door to the CPU operator -------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "queries", "keys"), [(1, 0, 5), (1, 3, 0), (0, 3, 5), (1, 0, 0)])
def test_empty_inputs_do_not_kill_the_process(batch: int, queries: int, keys: int) -> None:
    out, lse = flash_with_lse(*qkv(batch, 4, 2, queries, keys), 0.3)
    assert out.shape == (batch, 4, queries, 8)
    assert not out.any()
    assert torch.isneginf(lse).all()


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(3, 2), (2, 4), (2, 0)])
def test_heads_that_do_not_divide_are_refused(q_heads: int, kv_heads: int) -> None:
    with pytest.raises(ValueError, match=rf"number of query heads \({q_heads}\)"):
        flash(*qkv(1, q_heads, kv_heads, 2, 2), 1.0)


def test_clashing_shapes_are_refused() -> None:
    q, k, v = qkv(2, 2, 2, 3, 3)
    for bad in (
        (q, k[:1], v[:1]),
        (q[..., :4], k[..., :4], v),
        (q, k[..., :4], v[..., :4]),
        (q.double(), k, v),
        (q, k, v[:, :, :2]),
    ):
        with pytest.raises(ValueError, match="clash"):
            flash(*bad, 1.0)


def test_causal_with_unequal_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="5 keys for 3 queries"):
        flash(*qkv(1, 2, 2, 3, 5), 1.0, causal=True)


def test_a_row_that_sees_nothing_has_no_weight() -> None:
    q, k, v = qkv(1, 2, 2, 2, 3)
    mask = torch.tensor([[0.0, 0.0, 0.0], [-INF, -INF, -INF]])[None, None]
    out, lse = flash_with_lse(q, k, v, 1.0, mask=mask)
    assert torch.isneginf(lse[..., 1]).all()
    assert torch.isfinite(lse[..., 0]).all()
    assert not out[:, :, 1].any()


# --- merging --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_merging_any_partition_equals_the_whole(seed: int) -> None:
    rng = random.Random(seed)
    keys = rng.randint(1, 40)
    q, k, v = qkv(1, 6, 2, 5, keys, 16)
    cuts = sorted([0, keys, *(rng.randint(0, keys) for _ in range(rng.randint(0, 5)))])  # repeated cuts: empty parts
    parts = [flash_with_lse(q, k[:, :, a:b], v[:, :, a:b], 0.25) for a, b in pairwise(cuts)]
    out, lse = merge(parts)
    whole, whole_lse = flash_with_lse(q, k, v, 0.25)
    torch.testing.assert_close(out, whole, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse, whole_lse, atol=1e-6, rtol=1e-6)


def test_merging_ignores_a_part_without_weight_even_if_it_is_nan() -> None:
    out, lse = flash_with_lse(*qkv(1, 2, 2, 3, 4), 1.0)
    poisoned = (torch.full_like(out, torch.nan), torch.full_like(lse, -INF))
    joined, joined_lse = merge([poisoned, (out, lse), poisoned])
    torch.testing.assert_close(joined, out, atol=1e-6, rtol=0)
    torch.testing.assert_close(joined_lse, lse, atol=1e-6, rtol=0)


def test_merging_nothing_is_nothing() -> None:
    part = (torch.zeros(1, 2, 3, 4), torch.full((1, 2, 3), -INF))
    out, lse = merge([part, part])
    assert not out.any()
    assert torch.isneginf(lse).all()


# --- pages and buckets ----------------------------------------------------------------------------------------------


def a_cache(num_blocks: int = 40, block_size: int = 4, kv_heads: int = 2) -> KVCache:
    cache = KVCache(range(3, 4), kv_heads, num_blocks, block_size, 8, torch.float32)
    cache.pages(3).normal_()
    return cache


def test_written_tokens_are_where_their_slots_say() -> None:
    cache = a_cache()
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    cache.write(3, torch.tensor([5, 6, 22]), k, v)
    for token, (block, offset) in enumerate([(1, 1), (1, 2), (5, 2)]):
        assert torch.equal(cache.keys(3)[:, block, offset], k[token])
        assert torch.equal(cache.values(3)[:, block, offset], v[token])
        assert torch.equal(cache.paged_views(3)[0][block, offset], k[token])
    assert cache.nbytes == 2 * 2 * 40 * 4 * 8 * 4


@pytest.mark.parametrize(("table", "kind"), [([4, 5, 6, 7], Run), ([9, 2, 7, 1], Gather), ([3, 4, 5, 1], Gather)])
@pytest.mark.parametrize(("first", "stop"), [(0, 16), (0, 5), (3, 16), (5, 7), (8, 13)])
def test_a_view_and_a_gather_read_the_same_tokens(table: list[int], kind: type, first: int, stop: int) -> None:
    cache = a_cache()
    whole = cache.keys(3)[:, table].flatten(1, 2)
    where = source(cache, table, first, stop)
    k, v = where.read(cache, 3)
    if first == 0 and stop == 16:
        assert isinstance(where, kind)
    assert torch.equal(k[0], whole[:, first:stop])
    assert torch.equal(v[0], cache.values(3)[:, table].flatten(1, 2)[:, first:stop])


def test_rows_of_unlike_length_are_not_padded_to_each_other() -> None:
    cache = KVCache(range(1), 1, 3000, 16, 8, torch.float32)
    lengths = [4000, 3900, 3100, 1000, 900, 40, 30, 3]
    batch = decode_batch(lengths, 16)
    buckets = bucketed(decode_rows(batch, 16, None), cache)
    sizes = sorted(bucket.keys.batch * bucket.keys.blocks if isinstance(bucket.keys, Gather) else 0 for bucket in buckets)
    padded, needed = sum(sizes), sum(-(-length // 16) for length in lengths)
    assert len(buckets) == 3
    assert padded <= 1.35 * needed


def test_every_decode_row_is_in_one_bucket() -> None:
    cache = KVCache(range(1), 1, 3000, 16, 8, torch.float32)
    rng = random.Random(0)
    for window in (None, 100):
        lengths = [rng.choice([1, 15, 16, 17, 300, 2000]) for _ in range(40)]
        rows = [bucket.rows for bucket in bucketed(decode_rows(decode_batch(lengths, 16), 16, window), cache)]
        tokens = [t for row in rows for t in (range(row.start, row.stop) if isinstance(row, slice) else row.tolist())]
        assert sorted(tokens) == list(range(40))


def decode_batch(lengths: list[int], block_size: int) -> Batch:
    """Decode rows that have `lengths` tokens, the new one included; blocks are never consecutive."""
    blocks = iter(range(0, 3000, 2))
    tables = [[next(blocks) for _ in range(-(-length // block_size))] for length in lengths]
    empty = torch.zeros(len(lengths), dtype=torch.int64)
    return Batch(empty, empty, empty, [1] * len(lengths), [length - 1 for length in lengths], tables, empty)


def test_garbage_past_the_end_of_a_row_is_not_seen() -> None:
    cache = a_cache()
    sequences = [[0] * 6, [0] * 13]
    tables = [[20, 7], [3, 9, 1, 30]]
    batch = batch_of([(0, 5, 1), (1, 12, 1)], sequences, tables, 4)
    q, k, v = torch.randn(2, 4, 8), torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    backend = CpuAttention()

    def attend() -> Tensor:
        return backend.attend(q, k, v, cache, backend.prepare(batch, cache), AttentionParams(3, 0.3))

    before = attend()
    used = {slot for table, tokens in zip(tables, sequences, strict=True) for slot in slots(table, len(tokens))}
    unused = [slot for slot in range(160) if slot not in used]
    cache.runs(3)[:, :, unused] = 1e4
    assert torch.equal(attend(), before)


def slots(table: list[int], length: int) -> list[int]:
    return [table[position // 4] * 4 + position % 4 for position in range(length)]


# --- backends against each other ------------------------------------------------------------------------------------


def reference(
    q: Tensor, k: Tensor, v: Tensor, context: int, window: int | None, scale: float, softcap: float | None = None
) -> Tensor:
    """Attention of one sequence's last queries, written out: q [queries, H, d], k and v [total, K, d]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1) for x in (k, v))
    at = torch.arange(context, context + q.shape[0])[:, None]
    key = torch.arange(k.shape[1])
    hidden = (key > at) if window is None else (key > at) | (key <= at - window)
    scores = q.transpose(0, 1) @ k.transpose(1, 2) * scale
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    return (scores.masked_fill(hidden, -INF).softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
@pytest.mark.parametrize("backend", [CpuAttention(), GatherAttention()], ids=lambda backend: type(backend).__name__)
def test_a_backend_equals_the_formula(backend: Any, window: int | None, softcap: float | None) -> None:
    torch.manual_seed(0)
    parts = [(0, 0, 5), (1, 11, 1), (2, 7, 9), (3, 0, 1), (4, 150, 1), (5, 30, 200)]
    totals = [start + count for _, start, count in parts]
    cache = KVCache(range(1), 2, 200, 4, 8, torch.float32)
    blocks = random.Random(1).sample(range(200), 130)
    tables = [[blocks.pop() for _ in range(-(-total // 4))] for total in totals]
    keys = [torch.randn(total, 2, 8) for total in totals]
    values = [torch.randn(total, 2, 8) for total in totals]
    for table, total, k, v in zip(tables, totals, keys, values, strict=True):
        cache.write(0, torch.tensor(slots(table, total)), k, v)
    batch = batch_of(parts, [[0] * total for total in totals], tables, 4)
    q = torch.randn(batch.num_tokens, 6, 8)
    fresh_k = torch.cat([k[start:] for (_, start, _), k in zip(parts, keys, strict=True)])
    fresh_v = torch.cat([v[start:] for (_, start, _), v in zip(parts, values, strict=True)])
    out = backend.attend(q, fresh_k, fresh_v, cache, backend.prepare(batch, cache), AttentionParams(0, 0.35, window, softcap))
    expected = torch.cat(
        [
            reference(rows, keys[index], values[index], start, window, 0.35, softcap)
            for (index, start, _), rows in zip(parts, q.split(batch.query_lens), strict=True)
        ]
    )
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def test_an_empty_step_attends_to_nothing() -> None:
    cache, batch = a_cache(), batch_of([], [], [], 4)
    for backend in (CpuAttention(), GatherAttention()):
        q, k = torch.zeros(0, 4, 8), torch.zeros(0, 2, 8)
        assert backend.attend(q, k, k, cache, backend.prepare(batch, cache), AttentionParams(3, 1.0)).shape == (0, 4, 8)


def test_the_fall_back_runs_a_whole_model() -> None:
    model = tiny("qwen2_alternating")
    sequences = [[index * 7 % 101 for index in range(length)] for length in (5, 30, 18)]
    for schedule in (chunked(sequences, 7, decode=3), mixed(sequences)):
        ours = run(model, Layout(), sequences, schedule, make_attention=GatherAttention)
        for tokens, logits in zip(sequences, ours, strict=True):
            torch.testing.assert_close(logits, model.logits(tokens), atol=1e-4, rtol=1e-4)


# --- adapters of CUDA kernels ---------------------------------------------------------------------------------------
# No GPU here: fakes with the real signatures record the call, and compute it with the formula.


class Fake:
    """Stands for one package's kernel: same parameters, recorded, and computed on CPU."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def compute(self, call: dict[str, Any], starts: Tensor, lengths: list[int]) -> Tensor:
        self.calls.append(call)
        window = None if call["window_size"][0] < 0 else call["window_size"][0] + 1
        out = []
        for index, total in enumerate(lengths):
            rows = call["q"][starts[index] : starts[index + 1]]
            k, v = (call[name][call["block_table"][index]].flatten(0, 1)[:total] for name in ("k", "v"))
            rows, k, v = rows.float(), k.float(), v.float()
            out.append(
                reference(rows, k, v, total - len(rows), window, call["softmax_scale"], call.get("softcap", 0.0) or None)
            )
        return torch.cat(out)


def stand_alone(fake: Fake) -> Any:
    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
        *, out=None,
    ):  # fmt: skip
        assert causal
        assert dropout_p == 0.0
        assert max_seqlen_q == cu_seqlens_q.diff().max()
        assert max_seqlen_k == cu_seqlens_k.diff().max()
        return fake.compute(locals(), cu_seqlens_q, cu_seqlens_k.diff().tolist())

    return flash_attn_varlen_func


def in_vllm(fake: Fake) -> Any:
    def flash_attn_varlen_func(
        q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None, scheduler_metadata=None,
        num_splits=0, fa_version=2,
    ):  # fmt: skip
        assert causal
        assert (cu_seqlens_k is None) != (seqused_k is None)
        assert block_table is None or seqused_k is not None
        assert max_seqlen_k == seqused_k.max()
        return fake.compute(locals(), cu_seqlens_q, seqused_k.tolist())

    return flash_attn_varlen_func


def in_torch(fake: Fake) -> Any:
    from torch.nn.attention.varlen import varlen_attn as real

    def varlen_attn(*args, **kwargs):
        call = inspect.signature(real).bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        assert given["enable_gqa"]
        assert given["window_size"][1] == 0
        renamed = {
            "q": given["query"],
            "k": given["key"],
            "v": given["value"],
            "softmax_scale": given["scale"],
            "window_size": given["window_size"],
            "block_table": given["block_table"],
        }
        return fake.compute(renamed, given["cu_seq_q"], given["seqused_k"].tolist())

    varlen_attn.__signature__ = inspect.signature(real)
    return varlen_attn


PACKAGES = {
    "vllm_flash_attn": ("flash_attn_varlen_func", stand_alone, 16),
    "vllm.vllm_flash_attn": ("flash_attn_varlen_func", in_vllm, 16),
    "flash_attn": ("flash_attn_varlen_func", stand_alone, 256),
    "torch.nn.attention.varlen": ("varlen_attn", in_torch, 256),
}


CAPPING = {"vllm_flash_attn", "vllm.vllm_flash_attn", "flash_attn"}
"""Those whose kernel can cap scores."""


def loader(**present: Any):
    """An import that finds only the given modules (dots written as ``__``)."""

    def load(name: str) -> ModuleType:
        try:
            return present[name.replace(".", "__")]
        except KeyError:
            raise ImportError(f"no module {name}") from None

    return load


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("window", [None, 3, 20])
@pytest.mark.parametrize("package", PACKAGES)
def test_an_adapter_calls_its_kernel_as_the_kernel_expects(package: str, window: int | None, softcap: float | None) -> None:
    function, make, block_size = PACKAGES[package]
    fake = Fake()
    module = SimpleNamespace(**{function: make(fake)})
    load = loader(**{package.replace(".", "__"): module})
    backend = choose_cuda(torch.bfloat16, block_size, load, softcap=softcap is not None)
    if softcap is not None and package not in CAPPING:
        assert isinstance(backend, GatherAttention)
        return
    assert package in backend.name

    torch.manual_seed(0)
    parts = [(0, 0, 5), (1, 33, 1), (2, 17, 9)]
    tables = [[4], [7, 2, 9], [1, 5]]
    cache = KVCache(range(1), 2, 10, block_size, 8, torch.float32)
    cache.pages(0).normal_()
    batch = batch_of(parts, [[0] * (start + count) for _, start, count in parts], tables, block_size)
    q, k, v = torch.randn(15, 6, 8), torch.randn(15, 2, 8), torch.randn(15, 2, 8)
    params = AttentionParams(0, 0.35, window, softcap)
    ours = backend.attend(q, k, v, cache, backend.prepare(batch, cache), params)
    oracle = CpuAttention()
    expected = oracle.attend(q, k, v, cache, oracle.prepare(batch, cache), params)
    torch.testing.assert_close(ours, expected, atol=2e-6, rtol=1e-5)
    (call,) = fake.calls
    assert call["block_table"].dtype == torch.int32
    assert call["k"].shape == (10, block_size, 2, 8)
    assert call["k"].data_ptr() == cache.keys(0).data_ptr()


def test_pages_too_small_for_a_kernel_pass_it_over() -> None:
    module = SimpleNamespace(flash_attn_varlen_func=stand_alone(Fake()))
    assert isinstance(choose_cuda(torch.bfloat16, 16, loader(flash_attn=module)), GatherAttention)
    assert "flash_attn" in choose_cuda(torch.bfloat16, 256, loader(flash_attn=module)).name
    both = loader(flash_attn=module, vllm_flash_attn=module)
    assert choose_cuda(torch.float16, 16, both).name == "vllm_flash_attn (CUDA)"


def test_fp32_and_old_functions_fall_back() -> None:
    module = SimpleNamespace(flash_attn_varlen_func=stand_alone(Fake()))
    assert isinstance(choose_cuda(torch.float32, 16, loader(vllm_flash_attn=module)), GatherAttention)
    old = SimpleNamespace(varlen_attn=lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False: None)
    assert isinstance(choose_cuda(torch.bfloat16, 256, loader(torch__nn__attention__varlen=old)), GatherAttention)


def test_a_wheel_for_another_torch_is_passed_over() -> None:
    def load(name: str) -> ModuleType:
        raise ImportError("undefined symbol: _ZN3c105ErrorC2")

    assert isinstance(choose_cuda(torch.bfloat16, 16, load), GatherAttention)


def test_cpu_gets_the_cpu_backend() -> None:
    assert isinstance(choose("cpu", torch.bfloat16), CpuAttention)
