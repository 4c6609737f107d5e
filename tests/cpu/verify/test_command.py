"""``shardwright verify`` as a person runs it: exit statuses, the JSON, the words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from actors.model.kernels.linear import linear
from actors.model.layers.layers import RowParallel
from placement.layout.layout import LayoutError
from placement.model.spec import ModelError
from serve_app.commands.verify_command import VerifyArgs, run_verify
from tests.support.models.tiny_models import tiny


def verified(capsys: pytest.CaptureFixture[str], *, as_json: bool = True, **asked: Any) -> tuple[int, str]:
    args = VerifyArgs(model=str(tiny("llama_biases").folder), dtype="float32", **asked)
    with pytest.raises(SystemExit) as ended:
        run_verify(args, as_json=as_json)
    return int(ended.value.code or 0), capsys.readouterr().out


def test_rounding_is_status_0_and_the_json_has_what_was_promised(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = verified(capsys, layout="tp=2,pp=2", tokens=24)
    report = json.loads(out)
    assert status == 0
    assert (report["verdict"], report["greedy_match"], report["ranks"]) == ("rounding", True, "threads")
    assert 0 < report["max_abs_error"] < report["tolerance"]
    assert "1e-4" in report["tolerance_from"]
    assert [case["name"] for case in report["cases"]] == ["prefill", "chunked", "decode", "prefix", "mixed"]
    assert report["prompts"] == [24, 15, 8, 2]


def test_a_fault_is_status_1_and_names_the_layer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowParallel, "forward", lambda self, x, region: region.sum(linear(x, self.weight, self.bias)))
    status, out = verified(capsys, as_json=False, layout="tp=2", tokens=12)
    assert status == 1
    assert "fault: layer 0 is the first to depart" in out


def test_processes(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = verified(capsys, layout="tp=2", tokens=12, processes=True)
    assert (status, json.loads(out)["ranks"]) == (0, "processes")


def test_prompts_too_short_for_a_scattered_step_are_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no step was scattered" in json.loads(verified(capsys, layout="tp=2,sp=true", tokens=8)[1])["notes"][0]
    assert json.loads(verified(capsys, layout="tp=3,sp=true")[1])["notes"] == []


def test_what_cannot_be_asked_is_refused_before_anything_runs() -> None:
    with pytest.raises(LayoutError, match="tp=7"):
        run_verify(VerifyArgs(model=str(tiny("llama_biases").folder), layout="tp=7"), as_json=True)
    with pytest.raises(LayoutError, match="256 positions"):
        run_verify(VerifyArgs(model=str(tiny("llama_biases").folder), tokens=300), as_json=True)
    with pytest.raises(ModelError, match="no such folder"):
        run_verify(VerifyArgs(model="/nowhere"), as_json=True)
