"""Planted bugs, at least one per axis: each is called a fault, and the first layer it touches is named."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import actors.model.attention.cpu.prefill
import actors.rank.assembly
import actors.rank.runner
from actors.model.kernels.linear import linear
from actors.model.layers.layers import RowParallel, VocabularyHead
from actors.model.step.batch import Batch
from actors.model.step.regions import Region, Scattered
from actors.model.step.rope import Rope
from actors.rank.assembly import Parts
from actors.rank.pipeline import Pipeline
from actors.sampling.sampler import Sampler
from actors.verify.report import Report
from placement.layout import sequence_parallel
from placement.layout.layout import Layout
from placement.layout.mesh import Coords
from placement.legality import rules
from placement.model.spec import ModelSpec
from placement.ownership import shards
from placement.ownership.context import Ownership
from placement.ownership.shard import Shard
from placement.ownership.weight_slices import Parameter
from tests.support.models.tiny_models import tiny
from tests.support.verifying import Tamper, verify


def on_rank(rank: int, change: Callable[[Parts], None]) -> Tamper:
    """Change the parts of one world rank."""

    def tamper(parts: Parts) -> Parts:
        if parts.config.world_rank == rank:
            with torch.inference_mode(False), torch.no_grad():
                change(parts)
        return parts

    return tamper


def weight(parts: Parts, name: str) -> Tensor:
    return dict(parts.decoder.named_parameters())[name]


def assert_fault(report: Report, layer: int | str | None) -> None:
    assert report.verdict == "fault"
    assert (report.departs.layer if report.departs else None) == layer


def test_without_a_bug_it_is_rounding() -> None:
    report = verify(tiny("llama2"), "tp=2,pp=2")
    assert report.verdict == "rounding"
    assert report.greedy_match
    assert 0 < report.max_abs_error < 1e-5 < report.tolerance
    assert [case.name for case in report.cases] == ["prefill", "chunked", "decode", "prefix", "mixed"]
    assert all(case.sampled and case.repeats and case.departs is None for case in report.cases)


def test_a_wrong_slice_of_a_row_parallel_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    right = shards.inputs

    def shifted(name: str, source: str, rows: int, inputs: int, take: range) -> Parameter:
        wrong = name == "layers.1.mlp.down.weight" and take.start > 0
        return right(name, source, rows, inputs, range(take.start - 1, take.stop - 1) if wrong else take)

    monkeypatch.setattr(shards, "inputs", shifted)
    assert_fault(verify(tiny("llama2"), "tp=2"), 1)


def test_a_row_parallel_bias_added_once_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: RowParallel, x: Tensor, region: Region) -> Tensor:
        return region.sum(linear(x, self.weight, self.bias))

    monkeypatch.setattr(RowParallel, "forward", forward)
    assert_fault(verify(tiny("llama_biases"), "tp=3"), 0)
    assert verify(tiny("llama2"), "tp=3").verdict == "rounding"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_shard_scaled_by_a_hundredth(dtype: torch.dtype) -> None:
    tamper = on_rank(1, lambda parts: weight(parts, "layers.2.mlp.gate_up.weight").mul_(1.01))
    assert_fault(verify(tiny("llama2"), "tp=2", tamper=tamper, dtype=dtype, kinds=["prefill"]), 2)


def test_partial_attentions_merged_without_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def unweighted(parts: Any) -> tuple[Tensor, Tensor]:
        outputs, lses = zip(*parts, strict=True)
        return torch.stack(outputs).mean(0), torch.stack(lses).logsumexp(0)

    monkeypatch.setattr(actors.model.attention.cpu.prefill, "merge", unweighted)
    report = verify(tiny("llama2"), "tp=2", [19])
    assert_fault(report, 0)
    assert {case.name for case in report.cases if case.verdict == "fault"} >= {"chunked", "prefix"}


@pytest.mark.parametrize("layout", ["cp=2", "tp=4,dcp=2"])
def test_parts_of_a_context_on_several_ranks_merged_without_their_weights(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    if rules.broken(Layout.parse(layout), tiny("llama2").spec, None):
        pytest.skip(f"{layout} is not legal yet")
    merging = importlib.import_module("actors.model.attention.partial_outputs")

    def unweighted(parts: Any) -> tuple[Tensor, Tensor]:
        outputs, lses = zip(*parts, strict=True)
        return torch.stack(outputs).mean(0), torch.stack(lses).logsumexp(0)

    monkeypatch.setattr(merging, "merge", unweighted)
    assert_fault(verify(tiny("llama2"), layout, kinds=["prefill", "decode"]), 0)


def test_positions_of_a_split_prompt_counted_along_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank numbers the tokens it runs one after the other, not by where they stand in the prompt."""

    def counted(positions: Tensor, **fields: Any) -> Batch:
        return Batch(positions=positions[0] + torch.arange(len(positions)), **fields)

    monkeypatch.setattr(actors.rank.runner, "Batch", counted)
    assert verify(tiny("llama2"), "tp=1", [19], kinds=["prefill"]).verdict == "rounding"
    assert verify(tiny("llama2"), "cp=2", [19], kinds=["prefill"]).verdict == "fault"


@pytest.mark.parametrize("layout", ["cp=2", "tp=4,dcp=2"])
def test_blocks_kept_by_the_owner_they_are_not_assigned_to(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """The second owner writes the first one's blocks, and reads its own."""
    right = Ownership.slot

    def others(self: Ownership, position: int, blocks: list[int]) -> int:
        first = replace(self, owner=0)
        return right(first, position, blocks) if position // self.block_size // self.owners < len(blocks) else -1

    monkeypatch.setattr(Ownership, "slot", others)
    assert verify(tiny("llama2"), layout, [19], kinds=["decode"]).verdict == "fault"
    assert verify(tiny("llama2"), "tp=2", [19], kinds=["decode"]).verdict == "rounding"


def test_a_scattered_region_that_loses_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Scattered.gather
    monkeypatch.setattr(sequence_parallel, "TOKENS_PER_RANK", 2)
    monkeypatch.setattr(Scattered, "gather", lambda self, hidden: right(self, hidden).index_fill(0, torch.tensor([-1]), 0))
    report = verify(tiny("llama2"), "tp=2,sp=true")
    assert_fault(report, 0)


def test_a_scattered_region_that_passes_on_too_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Scattered.sum
    monkeypatch.setattr(sequence_parallel, "TOKENS_PER_RANK", 2)
    monkeypatch.setattr(Scattered, "sum", lambda self, partial: right(self, partial)[:-1])
    report = verify(tiny("llama2"), "tp=2,sp=true")
    assert report.verdict == "fault"


def test_stages_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    right = shards.shard

    def swapped(spec: ModelSpec, layout: Layout, coords: Coords) -> Shard:
        own = right(spec, layout, coords)
        return replace(own, layers=range(2 - own.layers.start, 4 - own.layers.start)) if layout.pp == 2 else own

    monkeypatch.setattr("placement.ownership.rank_identity.shard", swapped)
    assert_fault(verify(tiny("llama2"), "pp=2"), 0)


def test_a_sampled_token_that_reaches_the_first_stage_as_another(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Pipeline.receive_tokens
    monkeypatch.setattr(
        Pipeline, "receive_tokens", lambda self, through: ((at, token ^ 1) for at, token in right(self, through))
    )
    report = verify(tiny("llama2"), "pp=2")
    assert_fault(report, "embedding")
    assert [case.name for case in report.cases if case.verdict == "fault"] == ["decode"]


def test_positions_that_begin_anew_in_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Rope.at
    monkeypatch.setattr(Rope, "at", lambda self, positions: right(self, positions - positions[0]))
    report = verify(tiny("llama3"), "tp=2", [19])
    assert_fault(report, 0)
    assert [case.verdict for case in report.cases] == ["rounding", "fault", "fault", "fault", "fault"]


def _in_reverse(right: Any, num_kv_heads: int) -> Any:
    """KV heads of the layers that have so many, split from the last rank to the first; query heads as they should be."""

    def heads(kind: Any, *rest: Any) -> Any:
        found = right(kind, *rest)
        if kind.num_kv_heads != num_kv_heads:
            return found
        return [(q, kv) for (q, _), (_, kv) in zip(found, reversed(found), strict=True)]

    return heads


def test_query_heads_that_read_the_next_kv_head(monkeypatch: pytest.MonkeyPatch) -> None:
    right = shards.heads

    def off_by_one(spec: Any, *rest: Any) -> Any:
        found = right(spec, *rest)
        if len(found) <= spec.num_kv_heads:
            return found
        return [(q, range((kv.start + 1) % spec.num_kv_heads, (kv.start + 1) % spec.num_kv_heads + 1)) for q, kv in found]

    monkeypatch.setattr(shards, "heads", off_by_one)
    assert_fault(verify(tiny("llama2"), "tp=3"), 0)
    assert verify(tiny("llama2"), "tp=2").verdict == "rounding"
    assert_fault(verify(tiny("mimo_v2"), "tp=3"), 0)  # of its kinds of layers only the first has fewer KV heads than that


def test_heads_of_one_kind_of_layer_in_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "heads", _in_reverse(shards.heads, num_kv_heads=4))
    assert_fault(verify(tiny("mimo_v2"), "tp=2"), 1)


def test_padding_of_the_vocabulary_that_could_be_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VocabularyHead, "forward", lambda self, hidden: linear(hidden, self.weight).to(torch.float32))
    report = verify(tiny("llama2"), "tp=2")
    assert_fault(report, None)
    assert any("padding" in fault for fault in report.cases[0].faults)


def test_an_embedding_row_on_the_wrong_rank() -> None:
    tamper = on_rank(1, lambda parts: weight(parts, "embed.weight").copy_(weight(parts, "embed.weight").roll(1, 0)))
    assert_fault(verify(tiny("llama2"), "tp=2", tamper=tamper), "embedding")


def test_a_head_that_is_not_the_models() -> None:
    tamper = on_rank(1, lambda parts: weight(parts, "head.weight").copy_(weight(parts, "head.weight").roll(1, 0)))
    assert_fault(verify(tiny("llama2"), "tp=2", tamper=tamper), "head")


def test_a_sampler_that_is_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Sampler.sample

    def next_id(self: Sampler, logits: Tensor, rows: Any) -> Any:
        wrong = self._shard._tp.size > 1
        return [replace(choice, token=choice.token + wrong) for choice in right(self, logits, rows)]

    monkeypatch.setattr(Sampler, "sample", next_id)
    report = verify(tiny("llama2"), "tp=2", kinds=["prefill", "chunked"])
    assert_fault(report, None)
    assert report.max_abs_error < report.tolerance
    assert not report.greedy_match
    assert report.cases[0].disagreements[0].token == report.cases[0].disagreements[0].expected + 1


def test_noise_below_the_tolerance_is_a_fault_too() -> None:
    def noisy(parts: Parts) -> None:
        parts.decoder.layers["3"].register_forward_hook(lambda module, inputs, out: out + 1e-7 * torch.rand_like(out))

    report = verify(tiny("llama2"), "tp=2", tamper=on_rank(0, noisy))
    assert report.max_abs_error < report.tolerance
    assert not report.cases[0].repeats
    assert_fault(report, None)


def test_a_value_that_is_not_a_number_on_one_rank() -> None:
    def broken(parts: Parts) -> None:
        parts.decoder.layers["2"].register_forward_hook(
            lambda module, inputs, out: out.index_fill(0, torch.tensor([0]), torch.nan)
        )

    assert_fault(verify(tiny("llama2"), "tp=2", tamper=on_rank(1, broken)), 2)


class UnrotatedKey:
    """A rope that leaves the last head, the shared key, as it is."""

    def __init__(self, right: Any) -> None:
        self._right = right

    def of(self, batch: Any) -> Callable[[Tensor], Tensor]:
        rotate = self._right.of(batch)
        return lambda x: torch.cat((rotate(x)[:, :-1], x[:, -1:]), 1)


def wrong_scale(parts: Parts) -> None:
    attention = parts.decoder.layers["1"].attn
    attention.params = replace(attention.params, scale=parts.config.spec.mla.latent_dim**-0.5)


def latents_without_their_norm(parts: Parts) -> None:
    parts.decoder.layers["1"].attn.kv_a_norm = torch.nn.Identity()


def shared_key_not_rotated(parts: Parts) -> None:
    parts.decoder._ropes = [UnrotatedKey(rope) for rope in parts.decoder._ropes]


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("layout", ["tp=2", "cp=2", "tp=2,dcp=2"])
@pytest.mark.parametrize(("bug", "layer"), [(wrong_scale, 1), (latents_without_their_norm, 1), (shared_key_not_rotated, 0)])
def test_latents_that_are_not_what_they_should_be(bug: Callable[[Parts], None], layer: int, layout: str, family: str) -> None:
    report = verify(tiny(family), layout, [19, 5], tamper=on_rank(1, bug), kinds=["chunked", "decode"])
    assert_fault(report, layer)
    assert all(case.verdict == "fault" for case in report.cases)


@pytest.mark.parametrize(
    ("family", "layout"), [("deepseek_v2", "tp=2,pp=2"), ("deepseek_v3", "cp=2,tp=3,dcp=3"), ("deepseek_v2", "tp=3,sp=true")]
)
def test_latents_as_they_should_be(family: str, layout: str) -> None:
    assert verify(tiny(family), layout).verdict == "rounding"


def test_a_rank_that_cannot_go_on_is_a_fault_with_its_reason() -> None:
    def breaks(module: torch.nn.Module, inputs: Any) -> None:
        raise ValueError("out of luck")

    tamper = on_rank(1, lambda parts: parts.decoder.layers["1"].register_forward_pre_hook(breaks) and None)
    report = verify(tiny("llama2"), "tp=2", tamper=tamper)
    assert_fault(report, None)
    assert "out of luck" in report.cases[0].faults[0]
