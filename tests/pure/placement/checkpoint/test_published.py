"""Parameter counts of published models, from the config.json alone, against the counts that were published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from placement.checkpoint.header import read
from placement.checkpoint.hf.families import FAMILIES
from placement.cost.memory import parameter_count
from placement.cost.step_shape import StepShape
from placement.explain.explanation import as_json, explain
from placement.layout.layout import Layout
from tests.support.models.published import PUBLISHED


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_published_count(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name].config))
    assert parameter_count(read(tmp_path)) == pytest.approx(PUBLISHED[name].count, rel=1e-3)


def test_explain_tells_this_count(tmp_path: Path) -> None:
    model = PUBLISHED["gemma-3-4b"]
    (tmp_path / "config.json").write_text(json.dumps(model.config))
    told = as_json(explain(read(tmp_path), Layout(tp=2), StepShape.of(1, 1)), "m")
    assert told["model"]["parameters"] == model.count


def test_every_family_is_among_the_published_models() -> None:
    text = [model.config.get("text_config", model.config) for model in PUBLISHED.values()]
    assert {config["model_type"] for config in text if "model_type" in config} == FAMILIES.keys()
