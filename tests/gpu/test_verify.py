"""The proof that a layout equals one rank, with thread ranks that share a CUDA device."""

from __future__ import annotations

import pytest
import torch

from actors.verify.cases import KINDS
from actors.verify.ranks import WatchedThreads
from actors.verify.verification import Verification
from placement.layout.layout import Layout
from tests.support.inprocess import rank_config
from tests.support.models.tiny_models import tiny
from tests.support.verifying import random_prompts


@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "cp=2", "tp=4,dcp=2"])
def test_a_layout_is_one_rank_but_for_rounding(layout: str, device: torch.device) -> None:
    model = tiny("llama2")
    config = rank_config(model, Layout.parse(layout)).model_copy(update={"device": device.type})
    report = Verification(config, random_prompts(model, (19, 5, 1)), 2, KINDS, start=WatchedThreads).run()
    assert report.verdict == "rounding", report.model_dump_json(indent=1)
