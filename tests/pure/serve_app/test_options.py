"""One field makes a setting: command line, Serve arguments and YAML have it from there, and its default stands once."""

from __future__ import annotations

import inspect
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError
from typer.testing import CliRunner

from actors.engine.config.balancing import USUAL_INTERVAL
from actors.engine.config.engine_config import EngineConfig
from actors.engine.config.options import EngineOptions
from actors.wire.tier_config import TierConfig, TierOptions
from cluster.replica.options import ReplicaOptions
from cluster.replica.settings import ReplicaSettings
from placement.cost.kv_budget import USUAL_CONTEXT
from serve_app.commands import render_command, serve_command
from serve_app.commands.cli import app
from serve_app.commands.options import flag_of
from serve_app.commands.render_args import NOT_RENDERED, RenderArgs
from serve_app.deployment.settings import ArgumentError, ServeArgs, parse_args

CHAIN = (ServeArgs, ReplicaOptions, ReplicaSettings, EngineOptions, EngineConfig, TierOptions, TierConfig)
"""Every value that a setting passes on its way."""
DECIDED = {"device", "dtype", "layout", "max_model_len"}
"""Asked for by `ServeArgs`, decided from model and machines, and required from then on."""


def chain_of(name: str) -> list[type[BaseModel]]:
    return [each for each in CHAIN if name in each.model_fields]


def help_of(command: str) -> str:
    """The help text as one line."""
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "300"}).output
    return " ".join(re.sub(r"[│─╭╮╰╯]", " ", shown).split())


def served(monkeypatch: pytest.MonkeyPatch, *given: str) -> ServeArgs:
    """What ``serve`` comes to with these arguments."""
    found: list[ServeArgs] = []
    monkeypatch.setattr(serve_command, "run_server", lambda args, **_others: found.append(args))
    done = CliRunner().invoke(app, ["serve", *given])
    if done.exception is not None:
        raise done.exception
    return found[0]


@pytest.mark.parametrize("name", ServeArgs.model_fields)
def test_a_default_stands_once(name: str) -> None:
    declared = [each for each in CHAIN if name in inspect.get_annotations(each)]
    with_default = [each for each in declared if not each.model_fields[name].is_required()]
    assert len(with_default) == 1
    assert name in DECIDED or declared == with_default
    assert name in DECIDED or len({each.model_fields[name].get_default() for each in chain_of(name)}) == 1


def test_a_setting_keeps_its_name_to_the_place_of_use() -> None:
    assert EngineOptions.model_fields.keys() <= EngineConfig.model_fields.keys()
    assert TierOptions.model_fields.keys() <= TierConfig.model_fields.keys()
    assert ReplicaOptions.model_fields.keys() <= ReplicaSettings.model_fields.keys() & ServeArgs.model_fields.keys()


@pytest.mark.parametrize(
    ("command", "args", "without"), [("serve", ServeArgs, {"model"}), ("render", RenderArgs, {"model", *NOT_RENDERED})]
)
def test_every_setting_is_an_option_with_its_help(command: str, args: type[BaseModel], without: set[str]) -> None:
    shown = help_of(command)
    for name, field in args.model_fields.items():
        assert field.description, name
        assert (f" {flag_of(name, field)} " in shown.replace(",--", " --")) is (name not in without), name
        assert name in NOT_RENDERED or " ".join(field.description.split()) in shown, name


def test_help_tells_defaults() -> None:
    serve = help_of("serve")
    for text in ("2048", "64", "60.0", "16GiB", "auto", "head", "8000"):
        assert f"[default: {text}]" in serve
    assert f"{USUAL_INTERVAL} where ep > 1" in serve
    assert str(USUAL_CONTEXT) in serve
    assert "[default: 64GiB]" in help_of("render")


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        (["--kv-bytes", "2GiB"], "kv_bytes", 2**31),
        (["--threads", "3"], "threads_per_rank", 3),
        (["--threads-per-rank", "3"], "threads_per_rank", 3),
        (["--step-timeout", "9.5"], "step_timeout_s", 9.5),
        (["--replica-wait", "1"], "replica_wait_s", 1.0),
        (["--api-key", "a", "--api-key", "b"], "api_keys", ("a", "b")),
        (["--require-prefill"], "require_prefill", True),
        (["--ingress-node", "anywhere"], "ingress_node", "anywhere"),
        (["--disk-cache", "blocks"], "disk_cache", Path("blocks")),
        (["--max-sequences", "64"], "max_sequences", 64),
        (["smollm2-135m"], "model", "smollm2-135m"),
    ],
)
def test_an_option_sets_its_field_and_no_other(
    monkeypatch: pytest.MonkeyPatch, given: list[str], name: str, value: object
) -> None:
    args = served(monkeypatch, *given)
    assert getattr(args, name) == value
    assert args.model_fields_set == {name}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--device", "tpu"], "device"),
        (["--kv-bytes", "much"], "kv_bytes"),
        (["--step-timeout", "0"], "step_timeout_s"),
        (["--max-waiting", "0"], "max_waiting"),
        (["--disk-cache-bytes", "16GiB"], "disk_cache_bytes"),
    ],
)
def test_what_cannot_be_is_refused_by_the_model(monkeypatch: pytest.MonkeyPatch, given: list[str], named: str) -> None:
    with pytest.raises(ValidationError) as refused:
        served(monkeypatch, *given)
    assert [each["loc"] for each in refused.value.errors()] == [(named,)]


def test_a_former_name_is_accepted_and_said_to_be_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert parse_args({"entrance": "anywhere"}).ingress_node == "anywhere"
    assert "entrance is now called ingress_node" in caplog.text
    with pytest.raises(ArgumentError, match=r"ingress_node: .*'nowhere'"):
        parse_args({"entrance": "nowhere"})
    with pytest.raises(ArgumentError, match="unknown: entrance; the arguments are"):
        parse_args({"entrance": "head", "ingress_node": "head"})


def test_null_bounds_a_directory_as_usual() -> None:
    assert parse_args({"disk_cache_bytes": None}).disk_cache_bytes == ServeArgs().disk_cache_bytes


def test_settings_that_are_given_go_into_the_serve_file(capsys: pytest.CaptureFixture[str]) -> None:
    more = {"kv_bytes": "2GiB", "max_sequences": 32, "disk_cache": "/blocks", "host_cache": 0}
    render_command.run_render(RenderArgs.model_validate({"layout": "tp=2", **more}))
    [application] = yaml.safe_load(capsys.readouterr().out)["applications"]
    asked = parse_args(application["args"])
    assert (asked.kv_bytes, asked.max_sequences, asked.disk_cache) == (2**31, 32, Path("/blocks"))
    assert "max_batch_tokens" not in application["args"]
    assert json.dumps(application["args"])


@pytest.mark.parametrize("given", [{name: value} for name, value in zip(NOT_RENDERED, (("a",), "head", 1), strict=True)])
def test_what_the_files_decide_cannot_be_asked_for(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="cannot be rendered"):
        RenderArgs.model_validate(given)
