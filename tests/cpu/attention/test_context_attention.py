"""The pieces of context parallelism one by one: merging, what queries see, packing, and kernels that are not here."""

from __future__ import annotations

import random
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.model.attention.context.mask_spans import mask_spans
from actors.model.attention.cpu.flash import flash_with_lse
from actors.model.attention.cpu.partial_kernel import CpuPartial
from actors.model.attention.cuda.partial_kernels import EagerPartial, FlashPartial, choose_cuda_partial
from actors.model.attention.decode_row import decode_row
from actors.model.attention.eager import eager_attention
from actors.model.attention.params import AttentionParams
from actors.model.attention.partial_outputs import OutputAccumulator, merge_packed, pack, unpack
from actors.model.kv.kv_cache import KVCache
from placement.ownership.context import Ownership, spans

torch.set_num_threads(1)
CPU = torch.device("cpu")
PARAMS = AttentionParams(layer=0, scale=0.3)


def inputs(queries: int, keys: int, heads: int = 4, kv_heads: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(1, heads, queries, 8), torch.randn(1, kv_heads, keys, 8), torch.randn(1, kv_heads, keys, 8)


def by_formula(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """float64, no tricks: output and log-sum-exp; rows that see nothing are 0 and -inf."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, 1) for x in (k, v))
    scores = (q.double() @ k.mT * 0.3).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1).nan_to_num() @ v).float(), scores.logsumexp(-1).float()


@pytest.mark.parametrize("seed", range(12))
def test_parts_of_any_partition_make_the_whole(seed: int) -> None:
    rng = random.Random(seed)
    keys = rng.randint(1, 30)
    q, k, v = inputs(5, keys, seed=seed)
    owner = torch.tensor([rng.randrange(rng.randint(1, 6)) for _ in range(keys)])
    total = OutputAccumulator(4, 5, 8, CPU)
    for part in rng.sample(range(7), 7):  # part 6 is always empty
        mine = owner == part
        out, lse = flash_with_lse(q, k[:, :, mine].contiguous(), v[:, :, mine].contiguous(), 0.3)
        total.add(slice(0, 5), out[0], lse[0])
    whole, lse = by_formula(q, k, v, torch.ones(5, keys, dtype=torch.bool))
    torch.testing.assert_close(total.out, whole[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(total.lse, lse[0], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packing_keeps_the_lse_exact(dtype: torch.dtype) -> None:
    out, lse = torch.randn(2, 3, 8).to(dtype), torch.tensor([[1.2345678, -torch.inf, 9e4], [-3.1e-5, 0.0, 7.0]])
    packed = pack(out, lse, dtype)
    assert packed.shape == (2, 3, 8 + 4 // packed.itemsize)
    back_out, back_lse = unpack(packed)
    assert torch.equal(back_out, out)
    assert torch.equal(back_lse, lse)
    merged, total = merge_packed(torch.stack((packed, pack(out * torch.nan, torch.full_like(lse, -torch.inf), dtype))))
    torch.testing.assert_close(total, lse)
    assert not merged.isnan().any()


@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize("seed", range(10))
def test_mask_spans_show_each_query_what_it_sees_and_nothing_else(seed: int, window: int | None) -> None:
    rng = random.Random(seed)
    start, count, cp = rng.randint(0, 20), rng.randint(1, 40), rng.randint(1, 4)
    runs = spans(start, count, cp, rng.randrange(cp))
    owned = Ownership(rng.randint(1, 3), 0, 4).positions(start + count)
    passed = np.concatenate([np.arange(run.start, run.stop) for run in spans(start, count, cp, rng.randrange(cp))])
    at = torch.tensor([position for run in runs for position in run])
    for keys in (owned, passed, np.arange(start + count), np.zeros(0, np.int64)):
        q, k, v = inputs(len(at), max(1, len(keys)), seed=seed)
        total = OutputAccumulator(4, len(at), 8, CPU)
        for call in mask_spans(runs, keys, window, CPU):
            parts = (q[:, :, call.queries], k[:, :, call.keys], v[:, :, call.keys])
            out, lse = flash_with_lse(*parts, 0.3, causal=call.causal, mask=call.mask)
            total.add(call.queries, out[0], lse[0])
        key = torch.from_numpy(keys)
        visible = key <= at[:, None] if window is None else (key <= at[:, None]) & (key > at[:, None] - window)
        whole, lse = by_formula(q, k[:, :, : len(keys)], v[:, :, : len(keys)], visible)
        torch.testing.assert_close(total.out, whole[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(total.lse, lse[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("causal", [False, True])
def test_eager_attention_equals_the_operator(causal: bool, softcap: float | None) -> None:
    q, k, v = inputs(6, 6)
    found = eager_attention(q, k, v, 0.3, causal=causal, softcap=softcap)
    right = flash_with_lse(q, k, v, 0.3, causal=causal, softcap=softcap)
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)


# No GPU here: a fake with the packages' signature computes with the formula.


def fake_package(calls: list[dict[str, Any]]) -> ModuleType:
    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=None,
        causal=False,
        block_table=None,
        return_attn_probs=False,
    ):
        calls.append(locals())
        assert return_attn_probs
        outs, lses = [], []
        for at, (first, stop) in enumerate(zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:], strict=False)):
            begin, end = cu_seqlens_k.tolist()[at : at + 2]
            if block_table is None:
                keys, values = k[begin:end], v[begin:end]
            else:
                keys, values = (x[block_table[at].long()].flatten(0, 1)[: end - begin] for x in (k, v))
            block = (x.transpose(0, 1).unsqueeze(0) for x in (q[first:stop], keys, values))
            out, lse = eager_attention(*block, softmax_scale, causal=causal)
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0])
        return torch.cat(outs), torch.cat(lses, -1), None

    return SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)  # type: ignore[return-value]


def test_a_package_that_returns_the_lse_is_used_for_blocks_and_pages() -> None:
    calls: list[dict[str, Any]] = []
    modules = {"vllm_flash_attn": fake_package(calls)}

    def load(name: str) -> ModuleType:
        if name not in modules:
            raise ImportError(name)
        return modules[name]

    kernel = choose_cuda_partial(torch.bfloat16, 16, load)
    assert isinstance(kernel, FlashPartial)
    for causal, keys in ((True, 6), (False, 9)):
        q, k, v = inputs(6, keys)
        torch.testing.assert_close(
            kernel.dense(q, k, v, PARAMS, causal),
            CpuPartial().dense(q, k, v, PARAMS, causal),
            atol=1e-5,
            rtol=1e-5,
        )
    cache = KVCache(range(1), 2, 8, 16, 8, torch.float32)
    cache.pages(0).normal_()
    rows = [decode_row(0, [3, 1], 0, 20, 16), decode_row(1, [5], 0, 7, 16), decode_row(2, [2, 6], 5, 30, 16)]
    q = torch.randn(3, 4, 8)
    found, right = (OutputAccumulator(4, 3, 8, CPU) for _ in range(2))
    for total, chosen in ((found, kernel), (right, CpuPartial())):
        for task in chosen.decode(rows, cache):
            out, lse = task.run_with_lse(q[task.rows], cache, PARAMS)
            total.add(task.rows, out.transpose(0, 1), lse.transpose(0, 1))
    torch.testing.assert_close((found.out, found.lse), (right.out, right.lse), atol=1e-5, rtol=1e-5)
    assert [call["block_table"] is not None for call in calls] == [False, False, True]


def test_without_a_package_or_with_fp32_it_is_eager() -> None:
    def load(name: str) -> ModuleType:
        raise ImportError(name)

    assert type(choose_cuda_partial(torch.bfloat16, 16, load)) is EagerPartial
    assert type(choose_cuda_partial(torch.float32, 16, lambda name: fake_package([]))) is EagerPartial
    assert type(choose_cuda_partial(torch.bfloat16, 8, lambda name: fake_package([]))) is EagerPartial
    assert type(choose_cuda_partial(torch.bfloat16, 16, lambda name: fake_package([]), softcap=True)) is EagerPartial
