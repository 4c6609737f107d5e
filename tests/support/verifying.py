"""Short ways to verify a tiny model, for tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import torch

from actors.rank.assembly import Parts
from actors.verify.cases import KINDS
from actors.verify.ranks import WatchedThreads
from actors.verify.report import Report
from actors.verify.verification import Verification
from placement.layout.layout import Layout
from tests.support.inprocess import rank_config
from tests.support.models.tiny_models import TinyModel

Tamper = Callable[[Parts], Parts]


def random_prompts(model: TinyModel, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Token ids of the model's vocabulary."""
    draw = random.Random(seed)
    return [[draw.randrange(model.spec.vocab_size) for _ in range(length)] for length in lengths]


def verify(
    model: TinyModel,
    layout: str,
    lengths: Sequence[int] = (19, 5, 1),
    *,
    dtype: torch.dtype = torch.float32,
    kinds: Sequence[str] = KINDS,
    generate: int = 2,
    tamper: Tamper | None = None,
    block_size: int = 4,
    seed: int = 0,
) -> Report:
    """The report on `model` under `layout` with thread ranks; `tamper` plants a bug in the layout's ranks only."""
    torch.set_num_threads(1)
    config = rank_config(model, Layout.parse(layout), dtype, block_size)
    start = WatchedThreads if tamper is None else partial(WatchedThreads, tamper=tamper)
    return Verification(config, random_prompts(model, lengths, seed), generate, kinds, start=start).run()
