"""Which application `status` and `role` look at, of what Serve says there is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cluster.replica.status import cluster_state
from serve_app.commands import role_command, status_command
from serve_app.deployment.applications import ApplicationError, application_name
from serve_app.deployment.deployment_names import IMPORT_PATH


def application(*deployments: str, import_path: str | None = None) -> dict[str, Any]:
    config = None if import_path is None else {"import_path": import_path}
    return {"status": "RUNNING", "deployments": dict.fromkeys(deployments), "deployed_app_config": config}


def details(**applications: dict[str, Any]) -> dict[str, Any]:
    return {"applications": applications}


OURS, POOLED, OTHERS = application("Ingress", "Engine"), application("Ingress", "Prefill", "Mixed"), application("Ingress")
STARTING = application(import_path=IMPORT_PATH)
FOREIGN = application("Engine", import_path="theirs:app")


@pytest.mark.parametrize(
    ("found", "asked", "name"),
    [
        ({}, None, "shardwright"),
        (details(), "mine", "mine"),
        (details(demo=OURS), None, "demo"),
        (details(demo=POOLED, a=OTHERS, b=FOREIGN), None, "demo"),
        (details(demo=STARTING), None, "demo"),
        (details(demo=OURS, shardwright=OURS), None, "shardwright"),
        (details(demo=OURS, shardwright=OURS), "demo", "demo"),
        (details(a=OTHERS, b=FOREIGN), None, "shardwright"),
    ],
)
def test_the_application_that_is_meant(found: dict[str, Any], asked: str | None, name: str) -> None:
    assert application_name(found, asked) == name


def test_of_several_none_is_chosen() -> None:
    with pytest.raises(ApplicationError, match=r"2 applications, one, two: say which, as in --name one"):
        application_name(details(two=OURS, one=STARTING, three=OTHERS), None)


def test_one_that_is_not_there_is_told_with_those_that_are() -> None:
    state = cluster_state(details(one=OURS, two=OTHERS), "mine", {})
    assert (state.application, state.message) == ("NOT_STARTED", "there is no mine, but one, two")
    assert cluster_state({}, "mine", {}).message == ""


@contextmanager
def _nowhere(address: str | None) -> Iterator[None]:
    yield


def test_commands_that_cannot_choose_exit_with_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for module in (status_command, role_command):
        monkeypatch.setattr(module, "connected", _nowhere)
    monkeypatch.setattr("cluster.replica.status.serve_details", lambda: details(one=OURS, two=OURS))
    monkeypatch.setattr("cluster.nodes.discover.best_device", lambda: "cpu")
    monkeypatch.setattr("cluster.nodes.discover.discover", lambda device: type("Cluster", (), {"nodes": ()}))
    with pytest.raises(SystemExit) as status:
        status_command.run_status(None, as_json=False)
    with pytest.raises(SystemExit) as role:
        role_command.run_role("a", "mixed", 1.0, None, as_json=False)
    assert (status.value.code, role.value.code) == (2, 2)
    assert capsys.readouterr().err.count("error: this cluster has 2 applications, one, two") == 2
