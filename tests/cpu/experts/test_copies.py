"""Experts in several copies, and on the move: logits stay, and each token runs once through each of its experts."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from actors.model.moe.layer_expert_map import LayerExpertMap
from actors.rank.threads import ThreadRanks
from actors.wire.experts import ExpertMove
from actors.wire.plans import Row, SequenceStart, StepPlan
from actors.wire.requests import SamplingParams
from placement.experts.expert_map import map_of
from placement.experts.moves import moves
from placement.layout.layout import Layout
from tests.support.expert_loads import shuffled
from tests.support.inprocess import rank_config
from tests.support.models.tiny_models import TinyModel, tiny

torch.set_num_threads(1)

Part = tuple[int, int, int]
"""(sequence, start, count)"""
STEPS: list[list[Part]] = [
    [(0, 0, 16)],  # before: a prompt, then decodes
    [(0, 16, 1)],
    [(0, 17, 1), (1, 0, 9)],  # during: a layer's experts move before each of these four
    [(0, 18, 1), (1, 9, 1)],
    [(0, 19, 1), (1, 10, 8)],
    [(0, 20, 1), (1, 18, 1), (2, 0, 5)],
    [(0, 21, 1), (1, 19, 6), (2, 5, 6)],  # after
    [(0, 22, 1), (1, 25, 1), (2, 11, 1)],
    [(0, 23, 1), (2, 12, 1)],
]
FIRST_MOVE = 2
LENGTHS = [25, 27, 14]
"""One more than is run: what the last token scores is not told."""


def model() -> TinyModel:
    """Five experts of 28 columns with biases; the router's are so large that most tokens go to the same ones."""
    return tiny("gpt_oss", bias=2.0)


def prompt(sequence: int) -> list[int]:
    return [random.Random(sequence).randrange(101) for _ in range(LENGTHS[sequence])]


def moved(layout: Layout) -> list[ExpertMove]:
    """To random maps, another for each layer, arranged without regard for what is there already."""
    spec = model().spec
    assert spec.moe is not None
    draw, old = random.Random(4), map_of(spec.moe, layout)
    found = []
    for layer in spec.moe.layers:
        new = shuffled(old, draw)
        transfers = [(each.source_slot, each.target_slot) for each in moves(old, new)]
        assert len(transfers) > 2
        found.append(ExpertMove(layer=layer, experts=list(new.experts[0]), transfers=transfers))
    return found


def run(layout: Layout, made: Sequence[ExpertMove]) -> tuple[list[Tensor], Counter[tuple[int, int, int]]]:
    """Log-probabilities [tokens run, vocabulary] of each sequence, and how often each (step, layer, expert) ran a token."""
    vocab = model().spec.vocab_size
    scores = [torch.full((length - 1, vocab), torch.nan) for length in LENGTHS]
    ranks = ThreadRanks(rank_config(model(), layout, block_size=4), num_blocks=24)
    try:
        for step, parts in enumerate(STEPS):
            mine = [move for at, move in enumerate(made, start=FIRST_MOVE) if at == step]
            ranks.send(plan(step, parts, layout.attn_dp, vocab).model_copy(update={"moves": mine, "asks_experts": True}))
            for piece in ranks.receive(30.0).prompt_logprobs:
                for at, entry in enumerate(piece.entries, start=piece.first - 1):
                    ids, values = zip(*entry.top, strict=True)
                    scores[piece.sequence_id][at, list(ids)] = torch.tensor(values)
        deadline = time.monotonic() + 20
        while len(ranks.reports) < layout.world * len(STEPS):  # ranks tell after they answer
            assert time.monotonic() < deadline, f"only {len(ranks.reports)} reports came"
            time.sleep(0.001)
    finally:
        ranks.close()
    ran: Counter[tuple[int, int, int]] = Counter()
    for report in ranks.reports:
        for layer in report.layers:
            ran.update({(report.step, layer.layer, expert): tokens for expert, tokens in enumerate(layer.tokens)})
    return scores, ran


def plan(step: int, parts: Sequence[Part], dp_size: int, vocab: int) -> StepPlan:
    sampling = SamplingParams(prompt_logprobs=vocab)
    started = [
        SequenceStart(
            sequence_id=index, dp_rank=index % dp_size, tokens=prompt(index), prompt_length=LENGTHS[index], sampling=sampling
        )
        for index, start, _ in parts
        if start == 0
    ]
    blocks = {index: list(range(8 * index, 8 * index + 8)) for index, start, _ in parts if start == 0}
    rows = [
        Row(sequence_id=index, dp_rank=index % dp_size, start=start, count=count, new_blocks=blocks.get(index, []))
        for index, start, count in parts
    ]
    return StepPlan(step=step, started=started, rows=rows)


@pytest.mark.parametrize("redundant", [2, 4])
@pytest.mark.parametrize("layout", ["tp=2,ep=2", "attn_dp=2,ep=2,dispatch=gather", "attn_dp=2,ep=2,dispatch=a2a"])
def test_copies_and_moves_change_no_logit_and_run_each_pair_once(layout: str, redundant: int) -> None:
    parsed = Layout.parse(f"{layout},redundant_experts={redundant}")
    scores, ran = run(parsed, moved(parsed))
    still, ran_still = run(parsed, [])
    _, expected = run(Layout(), [])
    for index, found in enumerate(scores):
        right = model().logits(prompt(index))[:-1].log_softmax(-1)
        torch.testing.assert_close(found, right, atol=1e-4, rtol=0)
        torch.testing.assert_close(found, still[index], atol=1e-4, rtol=0)
    assert ran == ran_still == expected
    for step, parts in enumerate(STEPS):
        for layer in range(4):
            assert sum(ran[step, layer, expert] for expert in range(5)) == 2 * sum(count for _, _, count in parts)


def test_the_router_is_skewed() -> None:
    _, ran = run(Layout(), [])
    of_layer = [[sum(ran[step, layer, expert] for step in range(len(STEPS))) for expert in range(5)] for layer in range(4)]
    assert all(max(tokens) > 0.4 * sum(tokens) for tokens in of_layer), of_layer


def test_ranks_that_each_run_their_own_copy_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug of the field: with copies on several ranks, each rank takes the nearest."""

    def nearest(self: LayerExpertMap, slots: Tensor) -> Tensor:
        experts = torch.tensor(self._experts, device=slots.device)[slots]  # type: ignore[attr-defined]
        own = torch.full_like(slots, len(self.held))
        for slot, expert in enumerate(self.held.tolist()):
            own = torch.where(experts == expert, slot, own)
        return own

    change = LayerExpertMap.change

    def noted(self: LayerExpertMap, experts: Sequence[int]) -> None:
        self._experts = list(experts)  # type: ignore[attr-defined]
        change(self, experts)

    monkeypatch.setattr(LayerExpertMap, "change", noted)
    monkeypatch.setattr(LayerExpertMap, "here", nearest)
    layout = Layout.parse("tp=2,ep=2,redundant_experts=2")
    scores, ran = run(layout, [])
    _, once = run(Layout(), [])
    assert sum(ran.values()) > sum(once.values())
    assert (scores[0] - model().logits(prompt(0))[:-1].log_softmax(-1)).abs().max() > 1e-2
