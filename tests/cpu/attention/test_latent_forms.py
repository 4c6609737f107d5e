"""The two forms of latent attention: equal to each other, to what they are by definition, whatever the pieces."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from actors.model.attention.cpu.backend import CpuAttention
from actors.model.attention.cpu.partial_kernel import CpuPartial
from actors.model.attention.cuda.gather import GatherAttention
from actors.model.attention.cuda.partial_kernels import EagerPartial, FlashPartial
from actors.model.attention.decode_row import decode_row
from actors.model.attention.params import AttentionParams
from actors.model.attention_selection import choose
from actors.model.kv.kv_cache import KVCache
from actors.model.latent import local
from actors.model.latent.forms import Absorbed, Naive
from actors.model.latent.heads import LatentHeads
from actors.model.latent.local import LocalLatent
from actors.model.step.batch import Batch
from placement.model.mla_spec import MLASpec

torch.set_num_threads(1)

V3 = MLASpec(q_lora_rank=1536, kv_lora_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
TINY = MLASpec(kv_lora_rank=16, nope_dim=8, rope_dim=4, value_dim=6)
Always = Callable[[MLASpec, int, int], bool]


def heads_of(mla: MLASpec, num_heads: int, seed: int = 0) -> LatentHeads:
    weight = torch.randn(num_heads * (mla.nope_dim + mla.value_dim), mla.kv_lora_rank, generator=generator(seed))
    return LatentHeads(nn.Parameter(weight / mla.kv_lora_rank**0.5, requires_grad=False), mla)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def by_definition(q: Tensor, latents: Tensor, heads: LatentHeads, scale: float, mask: Tensor) -> Tensor:
    """[queries, heads, value_dim] in float64, head by head."""
    mla, outs = heads.mla, []
    compressed, shared = latents.double().split((mla.kv_lora_rank, mla.rope_dim), -1)
    for head, rows in enumerate(heads.weight.double().chunk(heads.num_heads)):
        keys = torch.cat((compressed @ rows[: mla.nope_dim].T, shared), -1)
        scores = (q[:, head].double() @ keys.T * scale).masked_fill(~mask, -torch.inf)
        outs.append(scores.softmax(-1) @ (compressed @ rows[mla.nope_dim :].T))
    return torch.stack(outs, 1)


@pytest.mark.parametrize("mla", [V3, TINY], ids=["v3", "tiny"])
def test_both_forms_are_the_definition(mla: MLASpec) -> None:
    heads, scale = heads_of(mla, 3), mla.query_dim**-0.5
    q = torch.randn(9, 3, mla.query_dim, generator=generator(1))
    latents = torch.randn(9, mla.latent_dim, generator=generator(2))
    right = by_definition(q, latents, heads, scale, torch.ones(9, 9).tril().bool()).float()
    found = []
    for form in (Naive(heads), Absorbed(heads)):
        queries = form.queries(q).transpose(0, 1).unsqueeze(0)
        out, _ = CpuPartial().dense(queries, *form.keys_values(latents[:, None]), AttentionParams(0, scale), causal=True)
        found.append(form.outputs(form.partial_outputs(out[0])).transpose(0, 1))
        torch.testing.assert_close(found[-1], right, atol=2e-5, rtol=2e-5)
    assert (found[0] - found[1]).abs().max() <= 1e-5 * right.abs().max()


def play(backend: LocalLatent, heads: LatentHeads, chunks: list[list[int]], block_size: int = 4) -> list[Tensor]:
    """Three sequences, each in the given chunks, chunk by chunk together; answers [tokens, heads, value_dim] of each."""
    mla, counts = heads.mla, [sum(sizes) for sizes in chunks]
    blocks = [-(-count // block_size) for count in counts]
    order = torch.randperm(sum(blocks), generator=generator(3)).tolist()
    tables = [[order.pop() for _ in range(need)] for need in blocks]
    cache = KVCache(range(1), 1, sum(blocks), block_size, mla.latent_dim, torch.float32, planes=1)
    inputs = [tokens_of(mla, heads.num_heads, index, count) for index, count in enumerate(counts)]
    done = [0] * len(chunks)
    outs: list[list[Tensor]] = [[] for _ in chunks]
    for step in range(max(map(len, chunks))):
        rows = [(index, done[index], sizes[step]) for index, sizes in enumerate(chunks) if step < len(sizes)]
        batch = batch_of(rows, tables, block_size)
        q, latents = (torch.cat([inputs[index][part][at : at + count] for index, at, count in rows]) for part in (0, 1))
        plan = backend.prepare(batch, cache)
        found = backend.attend(q, latents, heads, cache, plan, AttentionParams(0, mla.query_dim**-0.5))
        for (index, _, count), out in zip(rows, found.split([count for _, _, count in rows]), strict=True):
            outs[index].append(out)
            done[index] += count
    return [torch.cat(parts) for parts in outs]


def tokens_of(mla: MLASpec, num_heads: int, index: int, count: int) -> tuple[Tensor, Tensor]:
    q = torch.randn(count, num_heads, mla.query_dim, generator=generator(100 + index))
    return q, torch.randn(count, mla.latent_dim, generator=generator(200 + index))


def batch_of(rows: list[tuple[int, int, int]], tables: list[list[int]], block_size: int) -> Batch:
    places = [(index, position) for index, start, count in rows for position in range(start, start + count)]
    slots = [tables[index][position // block_size] * block_size + position % block_size for index, position in places]
    return Batch(
        token_ids=torch.zeros(len(places), dtype=torch.int64),
        positions=torch.tensor([position for _, position in places]),
        slots=torch.tensor(slots),
        query_lens=[count for _, _, count in rows],
        context_lens=[start for _, start, _ in rows],
        block_tables=[tables[index] for index, _, _ in rows],
        output_rows=torch.arange(0),
    )


CHUNKS = [[9, 20, 1, 1], [1, 1, 14, 3], [40, 1, 1]]


@pytest.mark.parametrize("piece", [1, 5, 8, 1024])
@pytest.mark.parametrize(
    "absorbs", [lambda *sizes: True, lambda *sizes: False, MLASpec.absorbs_row], ids=["absorbed", "naive", "rule"]
)
def test_chunks_over_a_cached_context_in_any_form_and_any_pieces(
    monkeypatch: pytest.MonkeyPatch, absorbs: Always, piece: int
) -> None:
    monkeypatch.setattr(MLASpec, "absorbs_row", absorbs)
    monkeypatch.setattr(local, "PIECE_TOKENS", piece)
    heads = heads_of(TINY, 4)
    found = play(LocalLatent(TINY, CpuAttention(), CpuPartial()), heads, CHUNKS)
    for index, out in enumerate(found):
        q, latents = tokens_of(TINY, 4, index, len(out))
        right = by_definition(q, latents, heads, TINY.query_dim**-0.5, torch.ones(len(out), len(out)).tril().bool())
        assert (out - right).abs().max() <= 1e-5 * right.abs().max()


def test_a_step_uses_both_forms() -> None:
    backend = LocalLatent(TINY, CpuAttention(), CpuPartial())
    cache = KVCache(range(1), 1, 40, 4, TINY.latent_dim, torch.float32, planes=1)
    batch = batch_of([(0, 30, 1), (1, 16, 20), (2, 0, 3), (3, 30, 2)], [list(range(10 * i, 10 * i + 10)) for i in range(4)], 4)
    plan = backend.prepare(batch, cache)
    assert plan.tokens.tolist() == [0, 24, 25]  # type: ignore[union-attr]
    assert [row.tokens for row in plan.naive] == [slice(1, 21), slice(21, 24)]


def test_context_is_expanded_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the context, no more than a piece of it has keys and values at once."""
    sizes: list[int] = []
    right = LatentHeads.expand
    monkeypatch.setattr(LatentHeads, "expand", lambda self, latents: sizes.append(len(latents)) or right(self, latents))
    monkeypatch.setattr(local, "PIECE_TOKENS", 64)
    play(LocalLatent(TINY, CpuAttention(), CpuPartial()), heads_of(TINY, 4), [[500, 30]])
    assert sizes == [500, 30, *[64] * 7, 52]


def test_a_decode_row_does_not_depend_on_its_neighbours() -> None:
    heads, backend = heads_of(TINY, 4), LocalLatent(TINY, CpuAttention(), CpuPartial())
    alone = play(backend, heads, [[40, 1, 1]])[0]
    with_others = play(backend, heads, [[40, 1, 1], [30, 1, 1], [33, 1, 1]])[0]
    torch.testing.assert_close(with_others[40:], alone[40:], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7])
def test_matrices_of_heads_give_a_row_the_same_bits_in_any_company(rows: int) -> None:
    heads = heads_of(V3, 4)
    q, sums = torch.randn(8, 4, 192, generator=generator(1)), torch.randn(4, 8, 512, generator=generator(2))
    assert torch.equal(heads.absorb(q)[:rows], heads.absorb(q[:rows]))
    assert torch.equal(heads.lift(sums)[:, :rows], heads.lift(sums[:, :rows]))


# CUDA, with packages that are not there


def package(calls: list[int]) -> ModuleType:
    """One whose kernel notes the size of heads it is given, and answers in matrix products."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, block_table, return_attn_probs
    ):  # type: ignore[no-untyped-def]
        calls.append(q.shape[-1])
        out, lse = EagerPartial().dense(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), AttentionParams(0, softmax_scale), causal
        )
        return out[0].transpose(0, 1), lse[0], None

    module = ModuleType("vllm_flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    return module


def test_on_cuda_latents_longer_than_a_kernel_takes_are_read_by_torch() -> None:
    from actors.model.attention.cuda.choose import choose_cuda

    load = lambda name: package([])  # noqa: E731
    assert type(choose_cuda(torch.bfloat16, 16, load, head_dim=256)) is not GatherAttention
    assert type(choose_cuda(torch.bfloat16, 16, load, head_dim=576)) is GatherAttention
    assert type(choose("cpu", torch.float32, head_dim=576)) is CpuAttention


def test_on_cuda_the_naive_form_is_the_packages_and_the_absorbed_torchs() -> None:
    """On CPU tensors, by a package that is not there: heads of 192 reach its kernel, latents of 576 never do."""
    from actors.model.attention.cuda.partial_kernels import choose_cuda_partial

    calls: list[int] = []
    kernel = choose_cuda_partial(torch.bfloat16, 16, lambda name: package(calls))
    assert type(kernel) is FlashPartial
    heads = heads_of(V3, 2)
    found = play(LocalLatent(V3, GatherAttention(), kernel), heads, [[200, 180, 1, 1]], block_size=16)[0]
    right = play(LocalLatent(V3, CpuAttention(), CpuPartial()), heads, [[200, 180, 1, 1]], block_size=16)[0]
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)
    assert set(calls) == {192}
    cache = KVCache(range(1), 1, 4, 16, 576, torch.float32, planes=1)
    kernel.dense(*(torch.randn(1, n, 3, 576) for n in (2, 1, 1)), AttentionParams(0, 0.1))
    cache.write(0, torch.arange(20), torch.randn(20, 1, 576), torch.randn(0))
    [task] = kernel.decode([decode_row(0, [0, 1], 0, 20, 16)], cache)
    task.run_with_lse(torch.randn(1, 2, 576), cache, AttentionParams(0, 0.1))
    assert set(calls) == {192}
