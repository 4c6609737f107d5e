"""How a command finds the cluster that another embeds: only one that runs, only one's own, never with others' eyes on it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cluster.embedded import session
from cluster.embedded.session import Session


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return session._folder()


def test_what_is_remembered_is_found_until_it_is_forgotten(folder: Path) -> None:
    assert session.latest() is None
    mine = Session("10.0.0.1:1", {"RAY_AUTH_TOKEN": "secret"})
    session.remember(mine)
    assert session.latest() == mine
    assert folder.stat().st_mode & 0o77 == 0
    assert [path.stat().st_mode & 0o77 for path in folder.iterdir()] == [0]
    session.forget()
    assert session.latest() is None


def test_a_command_that_is_gone_is_not_found_and_its_file_goes(folder: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    folder.mkdir(mode=0o700)
    (folder / f"{gone.pid}.json").write_text('{"address": "x", "environment": {}}')
    assert session.latest() is None
    session.remember(Session("y", {}))
    assert not (folder / f"{gone.pid}.json").exists()
    assert session.latest() == Session("y", {})


def test_a_folder_that_others_may_write_is_not_trusted(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    session.remember(Session("x", {}))
    assert list(folder.iterdir()) == []
    assert session.latest() is None
