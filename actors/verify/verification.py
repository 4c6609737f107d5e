"""A verification from end to end: the reference run on one rank, the runs of the layout, and the verdict.

    one rank, float32 ── greedy continuation ──→ texts
    one rank, float32 ── plain run ──────────→ reference ─┐   (with the expert routes of the tokens)
    layout,   float32 ── every case, twice ───────────────┼─→ verdict
    one rank, bfloat16 ─ plain run ──→ its own error ─────┤      (bfloat16 only)
    layout,   bfloat16 ─ every case, twice ───────────────┘

A verification in bfloat16 includes the one in float32, because bfloat16 rounding is so coarse that a shard scaled by 1.01 would
pass. In bfloat16, tokens are routed to the experts of the reference (`routes.py`); only float32 checks the routing itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import torch

from actors.engine.link.link import LinkError
from actors.verify.cases import KINDS, Case, CaseBlockPool, Text, make_case, plain
from actors.verify.expert_moves import with_moves
from actors.verify.judge import Tolerance, bfloat16_tolerance, certain_choices, float32_tolerance, judge
from actors.verify.ranks import Ran, StartRanks, WatchedRanks, WatchedThreads
from actors.verify.reference import Distance, Reference, distance, reference_of
from actors.verify.report import CaseReport, Report
from actors.verify.routes import RouteNotes, Routes
from actors.wire.plans import Row, SequenceStart, StepPlan
from actors.wire.rank_config import RankConfig
from actors.wire.requests import SamplingParams
from placement.layout import mesh, sequence_parallel
from placement.layout.layout import Layout
from placement.model.spec import DType
from placement.ownership import shards
from placement.ownership.shard import Shard

OnProgress = Callable[[str], None]
_REPEATED = 2


class Verification:
    """Compares `config.layout` with one rank on `prompts`, each continued by `generate` tokens.

    `kinds` are the cases to run, `start` starts the layout's ranks (as threads by default), and `on_progress` is called with a
    line of text for each stage.
    """

    def __init__(
        self,
        config: RankConfig,
        prompts: Sequence[Sequence[int]],
        generate: int = 6,
        kinds: Sequence[str] = KINDS,
        start: StartRanks = WatchedThreads,
        on_progress: OnProgress = lambda line: None,
    ) -> None:
        self._config, self._prompts, self._generate = config, prompts, generate
        self._kinds, self._start, self._on_progress = kinds, start, on_progress

    def run(self) -> Report:
        """Run every case, which may take minutes, and return the report. Ranks that fail in a case are reported as a fault.

        Raises `LinkError` if one of the single-rank runs fails or the ranks cannot start, and what `start` raises otherwise
        (such as `ValueError` with too few workers).
        """
        began = time.monotonic()
        texts, reference, routes = self._reference()
        tolerance = float32_tolerance(reference)
        cases = self._cases("float32", texts, reference, tolerance, None)
        one_rank: Distance | None = None
        if self._config.dtype != "float32":
            one_rank = self._one_rank_error(texts, reference, routes)
            tolerance = bfloat16_tolerance(one_rank)
            cases += self._cases(self._config.dtype, texts, reference, tolerance, routes)
        return self._report(cases, texts, reference, tolerance, one_rank, time.monotonic() - began)

    def _reference(self) -> tuple[list[Text], Reference, Routes]:
        """Returns the texts, which one rank continues from the prompts, and the reference and routes of its plain run."""
        prompts = [Text(tuple(prompt), len(prompt)) for prompt in self._prompts]
        longest = [Text((*text.tokens, *[0] * self._generate), text.prompt_length) for text in prompts]
        pool, notes = CaseBlockPool(self._config.block_size), RouteNotes()
        self._on_progress("one rank, float32")
        with closing(WatchedThreads(self._one_rank("float32"), pool.num_blocks(longest), tamper=notes.attach)) as ranks:
            texts = _continued(ranks, longest, pool)
            notes.take()
            ran = ranks.run(self._plain(texts, pool, 1).plans)
        return texts, reference_of(ran, texts, self._config.spec.vocab_size), notes.take()

    def _plain(self, texts: Sequence[Text], pool: CaseBlockPool, number: int) -> Case:
        ropes = (self._config.spec.rope_of(layer) for layer in range(self._config.spec.num_layers))
        return plain(texts, pool, number, in_one_go=not any(rope and rope.depends_on_length for rope in ropes))

    def _one_rank(self, dtype: DType) -> RankConfig:
        return self._config.model_copy(update={"layout": Layout(), "dtype": dtype})

    def _one_rank_error(self, texts: Sequence[Text], reference: Reference, routes: Routes) -> Distance:
        pool = CaseBlockPool(self._config.block_size)
        case = self._plain(texts, pool, 0)
        self._on_progress(f"one rank, {self._config.dtype}")
        with closing(WatchedThreads(self._one_rank(self._config.dtype), pool.num_blocks(texts), routes)) as ranks:
            return distance(ranks.run(case.plans), case.plans, reference, self._shards(Layout()))

    def _shards(self, layout: Layout) -> list[Shard]:
        return [shards.shard(self._config.spec, layout, mesh.coords_of(layout, rank)) for rank in range(layout.world)]

    def _cases(
        self, dtype: DType, texts: Sequence[Text], reference: Reference, tolerance: Tolerance, routes: Routes | None
    ) -> list[CaseReport]:
        """Run every case twice on the same ranks, and return the reports. If a rank fails, the remaining cases are not run."""
        layout = self._config.layout
        pool = CaseBlockPool(self._config.block_size, layout.kv_owners, layout.attn_dp)
        config = self._config.model_copy(update={"dtype": dtype})
        certain = certain_choices(reference, tolerance)
        reports: list[CaseReport] = []
        with closing(self._start(config, pool.num_blocks(texts), routes)) as ranks:
            for number, kind in enumerate(self._kinds):
                self._on_progress(f"{layout}, {dtype}, {kind}")
                case = make_case(kind, texts, pool, number + 1, certain)
                if kind == "decode":
                    case = with_moves(case, self._config.spec, layout)
                try:
                    runs = [ranks.run(case.plans) for _ in range(_REPEATED)]
                except LinkError as error:
                    return [*reports, _broken(case, tolerance, str(error))]
                found = distance(runs[0], case.plans, reference, self._shards(layout))
                reports.append(judge(case, reference, tolerance, runs[0], found, _same_bits(*runs)))
        return reports

    def _report(
        self,
        cases: Sequence[CaseReport],
        texts: Sequence[Text],
        reference: Reference,
        tolerance: Tolerance,
        one_rank: Distance | None,
        seconds: float,
    ) -> Report:
        asked = [case for case in cases if case.dtype == self._config.dtype]
        return Report(
            model=self._config.model_path,
            layout=str(self._config.layout),
            dtype=self._config.dtype,
            ranks="threads" if self._start is WatchedThreads else "processes",
            verdict="fault" if any(case.verdict == "fault" for case in cases) else "rounding",
            max_abs_error=max(case.max_abs_error for case in asked),
            tolerance=tolerance.logits,
            tolerance_from=tolerance.text,
            routes=None if self._config.spec.moe is None else _routes_text(self._config.dtype),
            one_rank_error=None if one_rank is None else one_rank.logits,
            greedy_match=all(case.greedy_match for case in cases),
            departs=next((case.departs for case in cases if case.verdict == "fault"), None),
            largest_logit=reference.largest_logit,
            prompts=tuple(text.prompt_length for text in texts),
            generated=self._generate,
            cases=tuple(cases),
            notes=tuple(_not_exercised(self._config.layout, texts)),
            seconds=seconds,
        )


def _routes_text(dtype: DType) -> str:
    own = "float32 cases judge routes too: every rank chooses the experts of a token itself"
    given = f"{dtype} cases judge the maths along given routes: a token takes the experts of one rank in float32"
    return own if dtype == "float32" else f"{own}; {given}"


def _continued(ranks: WatchedRanks, longest: Sequence[Text], pool: CaseBlockPool) -> list[Text]:
    """Returns the prompts, each continued by the greedy tokens of one rank."""
    greedy = SamplingParams(temperature=0.0)
    texts = []
    for index, text in enumerate(longest):
        prompt, wanted = list(text.tokens[: text.prompt_length]), len(text.tokens) - text.prompt_length
        start = SequenceStart(sequence_id=index, tokens=prompt, prompt_length=len(prompt), sampling=greedy)
        row = Row(
            sequence_id=index,
            start=0,
            count=len(prompt),
            new_blocks=list(range(pool.blocks_for(len(text.tokens)))),
            sample=True,
        )
        plan, tokens = StepPlan(step=0, started=[start], rows=[row]), list(prompt)
        while len(tokens) < len(prompt) + wanted:
            tokens.append(ranks.run([plan]).results[0].sampled[0].token)
            row = Row(sequence_id=index, start=len(tokens) - 1, count=1, append=tokens[-1:], sample=True)
            plan = StepPlan(step=len(tokens), rows=[row])
        texts.append(Text(tuple(tokens), len(prompt)))
    return texts


def _not_exercised(layout: Layout, texts: Sequence[Text]) -> Iterator[str]:
    least = sequence_parallel.scatter_from(layout)
    together = sum(text.prompt_length for text in texts if text.prompt_length > 1)
    if least is not None and together < least:
        yield (
            f"sp scatters steps of at least {least} prompt tokens, and these prompts have {together} together: no step was "
            "scattered; give longer ones"
        )


def _same_bits(first: Ran, second: Ran) -> bool:
    if [result.sampled for result in first.results] != [result.sampled for result in second.results]:
        return False
    for before, after in zip(first.records, second.records, strict=True):
        for a, b in zip(before, after, strict=True):
            values = [(a.hidden[layer], b.hidden[layer]) for layer in a.hidden]
            values += [(x, y) for (_, x), (_, y) in zip(a.logits, b.logits, strict=True)]
            if not all(torch.equal(x, y) for x, y in values):
                return False
    return True


def _broken(case: Case, tolerance: Tolerance, reason: str) -> CaseReport:
    return CaseReport(
        name=case.name,
        dtype=tolerance.dtype,
        verdict="fault",
        max_abs_error=float("inf"),
        max_logprob_error=float("inf"),
        tolerance=tolerance.logits,
        sampled=0,
        clear=0,
        greedy_match=False,
        repeats=False,
        faults=(reason,),
    )
