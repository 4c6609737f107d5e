"""The reason a person gets, out of the texts in which Ray and Serve wrap it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from ray.exceptions import RayTaskError

from actors.engine.admission import EngineBusy
from cluster.replica import failures
from cluster.replica.placement_wait import PlacementError
from cluster.replica.rank_checks import LaunchError
from placement.cost.memory import MemoryBudgetError
from placement.layout.layout import LayoutError
from placement.model.errors import ErrorReport, ReportedError, report_of
from placement.model.spec import ModelError
from serve_app.commands import deploy, serve_command
from serve_app.deployment.start_errors import error_text, foreign_reason, text_of

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
        ([WHOLE, REPLICA.format(last="ValueError: of no kind of ours")], "ValueError: of no kind of ours"),
        ([REPLICA.format(last="actors.engine.link.link.LinkTimeout: rank 1 is late")], "LinkTimeout: rank 1 is late"),
        (["", WHOLE], WHOLE),
        (["one\ntwo\n"], "two"),
        (["", ""], "Ray Serve gave no reason"),
        ([], "Ray Serve gave no reason"),
    ],
)
def test_of_what_ray_and_serve_write_it_is_one_line(messages: list[str], reason: str) -> None:
    assert foreign_reason(messages) == reason


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("m.safetensors: cut (a: b)", "m.safetensors: cut (a: b)"),
        ("two rules:\n- one\n- two", "two rules:\n- one\n- two"),
        ("y: z\n\nend of it", "y: z"),
        ("rank 0 could not start: it died\n\tclass_name: RankActor\n- no list", "rank 0 could not start: it died"),
        ("", "bad_model"),
    ],
)
def test_of_a_report_it_is_the_first_line_and_its_list(message: str, text: str) -> None:
    assert text_of(ErrorReport("bad_model", message)) == text


def test_an_exception_of_ours_is_its_text_and_any_other_is_named() -> None:
    assert error_text(LayoutError("tp=0 is too few\n- tp")) == "tp=0 is too few\n- tp"
    assert error_text(RuntimeError("Ray said\nmuch more")) == "RuntimeError: Ray said"
    assert error_text(KeyError("shardwright")) == "KeyError: 'shardwright'"


@pytest.mark.parametrize(
    ("cause", "report"),
    [
        (ModelError("m: cut"), ErrorReport("bad_model", "m: cut")),
        (MemoryBudgetError("too little"), ErrorReport("memory_budget", "too little")),
        (PlacementError("no room"), ErrorReport("no_room", "no room")),
        (EngineBusy("requests", 5, 5), ErrorReport("engine_busy", "5 requests are waiting already; the limit is 5")),
        (RuntimeError("ModelError: it only looks like one"), None),
    ],
)
def test_what_ray_brings_from_another_process_keeps_code_and_text(cause: Exception, report: ErrorReport | None) -> None:
    trace = f"ray::task()\n  File ...\n{type(cause).__name__}: something else\n"
    brought = RayTaskError("task", trace, cause).as_instanceof_cause()
    assert report_of(cause) == report_of(brought) == report
    assert error_text(brought) == ("RuntimeError: something else" if report is None else report.message)


def test_every_kind_of_error_has_a_code_of_its_own() -> None:
    def kinds(of: type[ReportedError]) -> Iterator[type[ReportedError]]:
        yield from (each for kind in of.__subclasses__() for each in (kind, *kinds(kind)))

    own = [
        kind.code for kind in kinds(ReportedError) if kind.__module__.split(".")[0] != "tests" and "Ray" not in kind.__name__
    ]
    codes = Counter(code for code in own if code != ReportedError.code)
    assert len(codes) > 8
    assert set(codes.values()) == {1}


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


def report_left(monkeypatch: pytest.MonkeyPatch, deployment: str, report: ErrorReport) -> None:
    monkeypatch.setattr(deploy, "_report", lambda name: report if name == deployment else None)


@pytest.mark.parametrize(
    ("left_by", "message"),
    [("1", "m: cut"), ("0", "m: cut"), ("no deployment", "LaunchError: as Serve has it")],
    ids=["second", "first", "foreign"],
)
def test_a_failed_deployment_is_told(
    left_by: str,
    message: str,
    states: list[SimpleNamespace | None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report_left(monkeypatch, left_by, ErrorReport("launch_failed", "m: cut\nmore of it"))
    states.append(status("DEPLOY_FAILED", WHOLE, "", REPLICA.format(last="LaunchError: as Serve has it")))
    with pytest.raises(SystemExit) as ended:
        deploy._wait_until_running(threading.Event(), lambda: None)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {message}\n"


class Store(dict[bytes, bytes]):
    """Ray's key-value store."""

    def put(self, key: bytes, value: bytes, namespace: bytes) -> None:
        self[namespace + key] = value

    def list(self, prefix: bytes, namespace: bytes) -> list[bytes]:
        return [key.removeprefix(namespace) for key in self if key.startswith(namespace + prefix)]


def test_a_constructor_leaves_its_own_errors_until_the_next_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    monkeypatch.setattr(failures, "_internal_kv_put", store.put)
    monkeypatch.setattr(failures, "_internal_kv_list", store.list)
    monkeypatch.setattr(failures, "_internal_kv_get", lambda key, namespace: store.get(namespace + key))
    monkeypatch.setattr(failures, "_internal_kv_del", lambda key, namespace: store.pop(namespace + key))
    for error in (ModelError("older"), RuntimeError("of no kind of ours"), LaunchError("two:\n- lines")):
        with pytest.raises(type(error)), failures.storing_errors("app", "Engine"):
            raise error
    with failures.storing_errors("other", "Engine"):
        pass
    assert failures.stored_error("app", "Engine") == ErrorReport("launch_failed", "two:\n- lines")
    assert failures.stored_error("app", "Prefill") is failures.stored_error("other", "Engine") is None
    failures.delete_errors("other")
    assert failures.stored_error("app", "Engine") is not None
    failures.delete_errors("app")
    assert failures.stored_error("app", "Engine") is None
    assert store == {}


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
