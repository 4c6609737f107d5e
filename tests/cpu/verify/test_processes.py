"""At least 25 layouts as real processes over the real groups: one pool of workers, lent to one layout after another."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.engine.link.link import LinkError
from actors.verify.processes import Workers
from actors.verify.report import Report
from actors.verify.verification import Verification
from actors.wire.plans import Row, SequenceStart, StepPlan
from actors.wire.requests import SamplingParams
from placement.layout.layout import Layout
from placement.legality import rules
from tests.support.inprocess import rank_config
from tests.support.layout_draws import draw_layout
from tests.support.long_cases import long
from tests.support.models.tiny_models import TinyModel, tiny
from tests.support.verifying import random_prompts, verify

EXPLICIT = ["tp=2", "tp=3", "tp=5", "tp=6", "pp=2", "pp=4", "tp=2,pp=2", "tp=2,pp=4", "tp=4,pp=2", "tp=3,pp=2,stage_layers=3/1"]
EXPLICIT += ["attn_dp=2,tp=2", "attn_dp=3,pp=2"]
NUM_LAYOUTS = 29
WORKERS = 8


def model() -> TinyModel:
    return tiny("qwen2_alternating")


def layouts() -> list[str]:
    """Those that must be there, and random ones that the rules accept, all different."""
    draw, found = random.Random(11), list(EXPLICIT)
    while len(found) < NUM_LAYOUTS:
        text = str(draw_layout(draw, model().spec, WORKERS))
        if text not in found:
            found.append(text)
    return found


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(WORKERS) as pool:
        yield pool


def verify_processes(workers: Workers, layout: str) -> Report:
    config = rank_config(model(), Layout.parse(layout), block_size=4)
    kinds = ["prefill", "prefix", "mixed"]
    return Verification(config, random_prompts(model(), (21, 6)), 2, kinds, start=workers.start).run()


@pytest.mark.parametrize("layout", [*EXPLICIT, *long(*layouts()[len(EXPLICIT) :])])
def test_a_layout_of_processes_is_rounding(workers: Workers, layout: str) -> None:
    assert not rules.broken(Layout.parse(layout), model().spec, None)
    report = verify_processes(workers, layout)
    assert report.verdict == "rounding", report
    assert report.ranks == "processes"


def test_processes_give_the_bits_of_threads(workers: Workers) -> None:
    processes = verify_processes(workers, "tp=3,pp=2")
    threads = verify(model(), "tp=3,pp=2", (21, 6), kinds=["prefill", "prefix", "mixed"])
    assert [case.max_abs_error for case in processes.cases] == [case.max_abs_error for case in threads.cases]


def test_a_rank_that_cannot_start_is_named_and_its_worker_is_free_again(workers: Workers) -> None:
    config = rank_config(model(), Layout(tp=2), block_size=4).model_copy(update={"model_path": "/nowhere"})
    with pytest.raises(LinkError, match=r"rank [01] failed: ModelError: .*/nowhere"):
        workers.start(config, 8)
    assert verify_processes(workers, "tp=2").verdict == "rounding"


def test_more_ranks_than_workers_is_refused() -> None:
    with Workers(1) as pool, pytest.raises(ValueError, match="tp=2 needs 2 ranks"):
        pool.start(rank_config(model(), Layout(tp=2)), 8)


def test_a_killed_rank_is_an_error_at_once_and_leaves_nothing_in_shared_memory() -> None:
    with Workers(2) as pool:
        ranks = pool.start(rank_config(model(), Layout(tp=2), block_size=4), 8)
        os.kill(pool.processes[1].pid, signal.SIGKILL)
        pool.processes[1].join(10)

        start = SequenceStart(sequence_id=0, tokens=[1, 2], prompt_length=2, sampling=SamplingParams())
        with pytest.raises(LinkError, match=r"rank [01] failed"):
            ranks.run([StepPlan(step=0, started=[start], rows=[Row(sequence_id=0, start=0, count=2, new_blocks=[0])])])
    assert not list(Path("/dev/shm").glob("*verify*"))
