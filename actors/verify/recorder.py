"""Recording of one rank by forward hooks: the output of every layer and of the head for each token, step by step.

Only forward hooks are used, so the rank runs its production code. A rank records the values that it holds. Each value is
identified by its (sequence, position), so values can be compared without gathering them from the ranks of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from actors.model.step.batch import Batch
from actors.model.step.regions import Regions, Scattered
from actors.rank.assembly import Parts, StepRunner
from actors.verify.cases import Key
from actors.wire.plans import Row, StepPlan
from actors.wire.requests import SamplingParams
from actors.wire.results import StepResult
from placement.cost.activations import scored_rows
from placement.layout import mesh

EMBEDDING = -1
"""The layer number that stands for the embedding."""


@dataclass
class StepRecord:
    """The record of one step of one rank.

    `keys` are the tokens of the step, `hidden` the output of each layer [tokens, hidden], and `logits` the calls of the head as
    (keys of the rows, [rows, vocabulary of this rank]). All tensors are fp32. `unknown` lists outputs of the head whose rows
    could not be matched to tokens.
    """

    step: int
    keys: list[Key] = field(default_factory=list)
    hidden: dict[int, Tensor] = field(default_factory=dict)
    logits: list[tuple[list[Key], Tensor]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


class Recorder:
    """Records the steps of one rank between two calls of `take`."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self._heads: list[list[Key]] = []
        self._scored: dict[int, tuple[SamplingParams, int]] = {}
        self._rows: Sequence[Row] = ()
        self._dp_rank = 0
        self._is_shared = False
        self._piece = 1

    def attach(self, parts: Parts, stepped: Callable[[], None] = lambda: None) -> Parts:
        """Register forward hooks on the decoder of `parts`, one rank, and return the parts with a runner that records each
        step. `stepped` is called after each step."""
        decoder = parts.decoder
        self._dp_rank = parts.identity.coords.attn_dp
        self._is_shared = mesh.HEAD_AXIS in parts.groups
        self._piece = scored_rows(parts.sampler.vocab_columns)
        decoder.register_forward_pre_hook(self._before)
        if parts.identity.shard.first_stage:
            decoder.embed.register_forward_hook(partial(self._layer, EMBEDDING))
        for name, layer in decoder.layers.items():
            layer.register_forward_hook(partial(self._layer, int(name)))
        decoder.head.register_forward_hook(self._head)
        return replace(parts, runner=_Recorded(parts.runner, self, stepped))

    def take(self) -> list[StepRecord]:
        """Returns the records of the steps since the last call, oldest first, and forgets them."""
        taken, self.steps = self.steps, []
        return taken

    def begin(self, plan: StepPlan) -> None:
        """Begin the record of the step that `plan` describes, before its forward pass. Called by the recorded runner."""
        mine = plan.of_dp_rank(self._dp_rank)
        plan = plan if self._is_shared else mine
        self._scored.update({start.sequence_id: (start.sampling, start.prompt_length) for start in plan.started})
        self._rows = mine.rows
        self._heads = self._head_calls(sorted(plan.rows, key=lambda row: row.dp_rank))
        self.steps.append(StepRecord(plan.step))

    def _before(self, decoder: nn.Module, inputs: tuple[Any, ...]) -> None:
        batch: Batch = inputs[0]
        rows = [row.sequence_id for row, count in zip(self._rows, batch.query_lens, strict=True) for _ in range(count)]
        keys = list(zip(rows, batch.positions.tolist(), strict=True))
        regions: Regions = decoder.regions  # type: ignore[assignment]
        if isinstance(regions.of(batch.query_lens), Scattered):
            own = regions.own(len(keys))
            keys = keys[own.start : own.stop]
        self.steps[-1].keys = keys

    def _layer(self, layer: int, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        self.steps[-1].hidden[layer] = output.to(torch.float32, copy=True)

    def _head(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        record = self.steps[-1]
        keys = self._heads.pop(0) if self._heads else []
        if len(keys) == output.shape[0]:
            record.logits.append((keys, output.to(torch.float32, copy=True)))
        else:
            record.unknown.append(f"step {record.step}: {output.shape[0]} rows of logits, {len(keys)} were expected")

    def _head_calls(self, rows: Sequence[Row]) -> list[list[Key]]:
        """Returns the keys of each call of the head in this step: first the sampled rows, then the scored rows per sequence."""
        sampled = [(row.sequence_id, row.start + row.count - 1) for row in rows if row.sample]
        calls = [sampled] if sampled else []
        for row in rows:
            sampling, prompt_length = self._scored[row.sequence_id]
            stop = min(row.start + row.count, prompt_length - 1)
            if sampling.prompt_logprobs is not None:
                scored = [(row.sequence_id, position) for position in range(row.start, stop)]
                calls += [scored[at : at + self._piece] for at in range(0, len(scored), self._piece)]
        return calls


class _Recorded:
    """A runner that passes each plan to the recorder before it runs the plan."""

    def __init__(self, runner: StepRunner, recorder: Recorder, stepped: Callable[[], None]) -> None:
        self._runner, self._recorder, self._stepped = runner, recorder, stepped

    def step(self, plan: StepPlan) -> StepResult | None:
        """See `StepRunner.step`. The step is recorded."""
        self._recorder.begin(plan)
        result = self._runner.step(plan)
        self._stepped()
        return result
