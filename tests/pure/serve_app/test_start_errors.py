"""The reason a person gets, out of the texts in which Ray and Serve wrap it."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from placement.layout.layout import LayoutError
from serve_app.commands import deploy, serve_command
from serve_app.deployment.start_errors import error_text, first_error_text

REPLICA = """The deployment failed to start 1 times in a row. This may be due to a problem with its constructor or initial \
health check failing. See controller logs for details. Error:
\x1b[36mray::ServeReplica:shardwright:Engine.initialize_and_get_metadata()\x1b[39m (pid=71, ip=10.0.0.2)
  File "/usr/lib/python3.11/concurrent/futures/_base.py", line 449, in result
    raise LaunchError(str(cause)) from error
{last}
"""
WHOLE = "The deployments ['Engine'] are UNHEALTHY."


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (
            ["", WHOLE, REPLICA.format(last="cluster.replica.launch.LaunchError: m.safetensors: cut (a: b)")],
            "m.safetensors: cut (a: b)",
        ),
        ([REPLICA.format(last="LaunchError: no dots")], "no dots"),
        ([REPLICA.format(last="placement.cost.memory.MemoryBudgetError: too little")], "too little"),
        ([REPLICA.format(last="placement.layout.layout.LayoutError: two rules:\n- one\n- two")], "two rules:\n- one\n- two"),
        ([REPLICA.format(last="ray.exceptions.RayTaskError(ModelError): x\nModelError: y: z\n\nend of it")], "y: z"),
        ([WHOLE, REPLICA.format(last="ValueError: of no kind of ours")], "ValueError: of no kind of ours"),
        ([REPLICA.format(last="actors.engine.link.link.LinkTimeout: rank 1 is late")], "LinkTimeout: rank 1 is late"),
        (["", WHOLE], WHOLE),
        (["one\ntwo\n"], "two"),
        (["", ""], "Ray Serve gave no reason"),
        ([], "Ray Serve gave no reason"),
    ],
)
def test_the_reason_is_found(messages: list[str], reason: str) -> None:
    assert first_error_text(messages) == reason


def test_an_exception_of_ours_is_its_text_and_any_other_is_named() -> None:
    assert error_text(LayoutError("tp=0 is too few\n- tp")) == "tp=0 is too few\n- tp"
    assert error_text(RuntimeError("Ray said\nmuch more")) == "RuntimeError: Ray said"
    assert error_text(KeyError("shardwright")) == "KeyError: 'shardwright'"


def status(state: str, message: str = "", *deployments: str) -> SimpleNamespace:
    described = {str(at): SimpleNamespace(message=each) for at, each in enumerate(deployments)}
    return SimpleNamespace(status=state, message=message, deployments=described)


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace | None]:
    """What Serve says at each poll; the last one for ever."""
    given: list[SimpleNamespace | None] = []
    monkeypatch.setattr(deploy, "_status", lambda: given.pop(0) if len(given) > 1 else given[0])
    monkeypatch.setattr(deploy, "_POLL_S", 0)
    return given


def test_a_controller_that_restarts_is_waited_for(states: list[SimpleNamespace | None]) -> None:
    states += [status("DEPLOYING"), None, None, status("RUNNING")]
    deploy._wait_until_running(threading.Event(), lambda: None)
    assert len(states) == 1


def test_a_controller_that_stays_silent_is_told(
    states: list[SimpleNamespace | None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(deploy, "_SILENT_S", 0.05)
    states.append(None)
    with pytest.raises(SystemExit) as ended:
        deploy._wait_until_running(threading.Event(), lambda: None)
    assert ended.value.code == 2
    assert "Ray Serve has not reported" in capsys.readouterr().err


def test_a_failed_deployment_is_told(states: list[SimpleNamespace | None], capsys: pytest.CaptureFixture[str]) -> None:
    states.append(status("DEPLOY_FAILED", WHOLE, REPLICA.format(last="cluster.replica.launch.LaunchError: m: cut")))
    with pytest.raises(SystemExit) as ended:
        deploy._wait_until_running(threading.Event(), lambda: None)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: m: cut\n"


@pytest.mark.parametrize(
    ("details", "found"), [({}, 8000), ({"http_options": {"port": 8000}}, 8000), ({"http_options": {"port": 8123}}, 8123)]
)
def test_the_port_is_that_of_a_serve_which_runs_already(
    details: dict[str, object], found: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert deploy._port(details, 8000) == found
    assert ("on port 8123" in capsys.readouterr().err) == (found != 8000)


@pytest.mark.parametrize(("interrupted", "code"), [(False, 2), (True, 130)])
def test_an_exception_of_ray_is_one_message(interrupted: bool, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    stop = threading.Event()
    if interrupted:
        stop.set()
    with pytest.raises(SystemExit) as ended, serve_command._errors_as_exit(stop):
        raise RuntimeError("the raylet is gone\nand more")
    assert ended.value.code == code
    assert capsys.readouterr().err == ("" if interrupted else "error: RuntimeError: the raylet is gone\n")
