"""A whole replica as threads, driven with plans: what it answers, several plans in flight, and how it fails."""

from __future__ import annotations

import pytest

from actors.engine.link.link import LinkError, LinkTimeout
from actors.rank.threads import ThreadRanks
from actors.wire.plans import Row, SequenceStart, StepPlan
from actors.wire.requests import SamplingParams
from placement.layout.layout import Layout
from tests.support.inprocess import rank_config
from tests.support.models.tiny_models import tiny

PROMPT = [5, 17, 99, 3, 42, 8, 77, 1, 64]
GREEDY = SamplingParams(temperature=0.0)
WAIT_S = 20.0


def prefill(sequence: int) -> StepPlan:
    start = SequenceStart(sequence_id=sequence, tokens=PROMPT, prompt_length=len(PROMPT), sampling=GREEDY)
    blocks = [4 * sequence, 4 * sequence + 2, 4 * sequence + 1]
    row = Row(sequence_id=sequence, start=0, count=len(PROMPT), new_blocks=blocks, sample=True)
    return StepPlan(step=sequence, started=[start], rows=[row])


@pytest.mark.parametrize("layout", ["", "tp=3", "pp=2", "tp=2,pp=2"])
def test_every_layout_says_what_transformers_says(layout: str) -> None:
    model = tiny("llama2")
    ranks = ThreadRanks(rank_config(model, Layout.parse(layout), block_size=4), num_blocks=16)
    try:
        for sequence in range(3):
            ranks.send(prefill(sequence))
        results = [ranks.receive(WAIT_S) for _ in range(3)]
    finally:
        ranks.close()
    assert [result.step for result in results] == [0, 1, 2]
    expected = int(model.logits(PROMPT)[-1].argmax())
    assert [result.sampled[0].token for result in results] == [expected] * 3


def test_a_plan_no_rank_can_run_is_reported_and_ends_the_ranks() -> None:
    ranks = ThreadRanks(rank_config(tiny("llama2"), Layout(tp=2), block_size=4), num_blocks=16)
    ranks.send(StepPlan(step=0, rows=[Row(sequence_id=9, start=0, count=1)]))
    with pytest.raises(LinkError, match=r"rank [01] failed: PlanError: plan names sequence 9"):
        ranks.receive(WAIT_S)
    ranks.close()


def test_a_model_that_is_not_there_is_reported() -> None:
    config = rank_config(tiny("llama2"), Layout(tp=2), block_size=4).model_copy(update={"model_path": "/nowhere"})
    ranks = ThreadRanks(config, num_blocks=4)
    with pytest.raises(LinkError, match="/nowhere"):
        ranks.receive(WAIT_S)
    ranks.close()


def test_silence_is_a_timeout() -> None:
    ranks = ThreadRanks(rank_config(tiny("llama2"), Layout(), block_size=4), num_blocks=4)
    with pytest.raises(LinkTimeout):
        ranks.receive(0.01)
    ranks.close()
    ranks.close()
