"""DP attention: DP ranks behind one scheduler, compared with one rank."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from actors.engine.config.engine_config import EngineConfig
from actors.model.step.batch import Batch
from actors.rank.runner import Runner
from actors.rank.threads import ThreadRanks
from actors.wire.plans import Row, SequenceStart, StepPlan
from actors.wire.requests import GenerateRequest, SamplingParams, TokenEvent
from placement.layout.layout import Layout
from tests.support.inprocess import in_process, rank_config
from tests.support.long_cases import long
from tests.support.models.tiny_models import tiny
from tests.support.random_requests import random_requests
from tests.support.verifying import verify

torch.set_num_threads(1)
PROMPT = [5, 17, 99, 3, 42, 8, 77, 1, 64]


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama2", "attn_dp=4"),
        ("llama2", "attn_dp=4,pp=2"),
        ("llama2", "attn_dp=4,tp=2,sp=true"),
        ("mixtral", "attn_dp=4,ep=4,dispatch=a2a"),
        ("glm4_moe", "attn_dp=4,tp=2,ep=4,dispatch=gather"),
        ("qwen2_moe", "attn_dp=4,pp=2,ep=2,redundant_experts=3"),
    ],
)
def test_one_request_in_one_dp_rank_of_four_is_answered_while_the_others_idle(family: str, layout: str) -> None:
    model, start = tiny(family), {"tokens": PROMPT, "prompt_length": len(PROMPT)}
    ranks = ThreadRanks(rank_config(model, Layout.parse(layout), block_size=4), num_blocks=8)
    begin = SequenceStart(sequence_id=0, dp_rank=2, sampling=SamplingParams(temperature=0.0), **start)
    row = Row(sequence_id=0, dp_rank=2, start=0, count=len(PROMPT), new_blocks=[5, 1, 6, 2], sample=True)
    tokens = list(PROMPT)
    try:
        for step in range(4):
            ranks.send(StepPlan(step=step, settled=step - 1, started=[begin] if step == 0 else [], rows=[row]))
            result = ranks.receive(20.0)
            assert [item.sequence_id for item in result.sampled] == [0]
            assert result.sampled[0].token == int(model.logits(tokens)[-1].argmax())
            tokens.append(result.sampled[0].token)
            row = Row(sequence_id=0, dp_rank=2, start=len(tokens) - 1, count=1, append=tokens[-1:], sample=True)
    finally:
        ranks.close()


@pytest.mark.parametrize("layout", ["attn_dp=2", "attn_dp=3,tp=2,pp=2", *long("attn_dp=2,cp=2,tp=4,dcp=2")])
def test_dp_ranks_are_rounding(layout: str) -> None:
    assert verify(tiny("llama2"), layout).verdict == "rounding"


def test_ranks_that_run_the_rows_of_all_dp_ranks_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's number means another block on every DP rank."""
    monkeypatch.setattr(StepPlan, "of_dp_rank", lambda self, dp_rank: self)
    assert verify(tiny("llama2"), "attn_dp=2", [19, 9, 14], kinds=["decode"]).verdict == "fault"
    assert verify(tiny("llama2"), "tp=2", [19, 9, 14], kinds=["decode"]).verdict == "rounding"


def test_a_dp_rank_that_reads_blocks_of_another_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Runner._batch

    def astray(self: Runner, rows: list[Row]) -> Batch:
        """DP rank 1 reads as if its blocks were numbered like those of DP rank 0, one further."""
        batch, last = right(self, rows), self._cache.num_blocks - 1
        tables = [[min(block + self._place.dp_rank, last) for block in table] for table in batch.block_tables]
        return replace(batch, block_tables=tables)

    monkeypatch.setattr(Runner, "_batch", astray)
    report = verify(tiny("llama2"), "attn_dp=2", [19, 9], kinds=["decode"])
    assert report.verdict == "fault"
    assert report.departs is not None
    assert report.departs.world_rank == 1
    assert verify(tiny("llama2"), "tp=2", [19, 9], kinds=["decode"]).verdict == "rounding"


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3_moe", "attn_dp=4,ep=4,redundant_experts=2"), ("llama3", "attn_dp=4,lm_head=stage")],
)
def test_five_hundred_requests_over_four_dp_ranks_with_aborts_equal_one_rank(family: str, layout: str) -> None:
    model, work = tiny(family, num_hidden_layers=2), [_short(request) for request in random_requests(500, seed=8)]
    aborted = {request.request_id for request in random.Random(9).sample(work, 60)}
    config = EngineConfig(block_size=4, num_blocks=24, max_model_len=96, max_batch_tokens=64, max_sequences=16, max_waiting=500)

    def run(layout: str, config: EngineConfig, aborted: set[str]) -> tuple[dict[str, TokenEvent], tuple[int, ...]]:
        with in_process(model, layout, config) as replica:
            waiting = [(request.request_id, replica.submit(request)) for request in work]
            for name in sorted(aborted):
                replica.engine.cancel(name)
            done = {name: replica.finish(events) for name, events in waiting}
            stats = replica.engine.stats()
        assert stats.free_blocks + stats.cached_blocks == stats.total_blocks, "blocks did not come back"
        return done, (stats.running, stats.waiting, stats.total_blocks)

    found, left = run(layout, config, aborted)
    expected, _ = run("", config.model_copy(update={"num_blocks": 400}), set())
    assert left == (0, 0, 4 * 24)
    for name, event in found.items():
        if event.finish == "abort":
            assert name in aborted
            assert event.tokens == expected[name].tokens[: len(event.tokens)]
        else:
            assert (event.tokens, event.finish) == (expected[name].tokens, expected[name].finish), name


def _short(request: GenerateRequest) -> GenerateRequest:
    return request.model_copy(update={"max_tokens": min(request.max_tokens, 8)})
