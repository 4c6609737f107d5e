"""Parameter counts of published models, from the config.json alone, against models that transformers builds without memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from placement.checkpoint.header import read
from placement.checkpoint.hf.families import TEXT_FAMILY
from placement.cost.memory import parameter_count
from tests.support.models.published import PUBLISHED

transformers = pytest.importorskip("transformers")


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    if "text_config" not in config:
        return config
    return {"model_type": TEXT_FAMILY.get(config["model_type"]), **config["text_config"]}


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_count_is_that_of_transformers(tmp_path: Path, name: str) -> None:
    config = PUBLISHED[name].config
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**text_config(config)))
    model.tie_weights()
    buffers = sum(each.numel() for path, each in model.named_buffers() if path.endswith("e_score_correction_bias"))
    assert parameter_count(spec) == sum(each.numel() for each in model.parameters()) + buffers
