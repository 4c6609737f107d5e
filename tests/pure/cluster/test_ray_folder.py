"""The folder of an embedded cluster's sockets: short enough, and nobody else's; or a message that says what to set."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.embedded import ray_folder
from cluster.embedded.ray_folder import MOST_BYTES, FolderError, own_folder

OWN = f"shardwright-{os.getuid()}"
NOBODY = 65534


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a short path, as the temporary folder."""
    with tempfile.TemporaryDirectory(prefix="f", dir="/tmp") as folder:
        monkeypatch.delenv("RAY_TMPDIR", raising=False)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_the_longest_socket_below_it_is_legal() -> None:
    assert len("x" * MOST_BYTES + ray_folder._BELOW) == 107


def test_it_is_this_user_s_in_the_temporary_folder(short: Path) -> None:
    assert own_folder() == str(short / OWN) == own_folder()
    assert (short / OWN).stat().st_mode & 0o7777 == 0o700


def test_a_temporary_folder_with_a_long_path_is_passed_over(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = short / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    assert own_folder([str(short)]) == str(short / OWN)
    assert list(long.iterdir()) == []


@pytest.mark.parametrize("fault", ["another's", "open", "link", "file"])
def test_a_folder_that_others_could_change_is_passed_over(short: Path, fault: str) -> None:
    folder, second = short / OWN, short / "b"
    second.mkdir()
    if fault == "another's":
        if os.getuid() != 0:
            pytest.skip("needs root, to make a folder of another user")
        folder.mkdir(mode=0o700)
        os.chown(folder, NOBODY, NOBODY)
    elif fault == "open":
        folder.mkdir()
        folder.chmod(0o755)
    elif fault == "link":
        folder.symlink_to(second)
    else:
        folder.touch(mode=0o600)
    assert own_folder([str(second)]) == str(second / OWN)
    with pytest.raises(FolderError, match=rf"{OWN}.*Set RAY_TMPDIR to a folder of your own .* at most {MOST_BYTES} bytes"):
        own_folder([])


def test_ray_s_own_variable_is_obeyed_or_refused_by_name(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(short / "r"))
    assert own_folder() == str(short / "r")
    monkeypatch.setenv("RAY_TMPDIR", str(short / ("r" * 60)))
    with pytest.raises(FolderError, match=r"^RAY_TMPDIR, .* bytes, and more than 36 leave no room for a socket"):
        own_folder()
    (short / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(short / "file"))
    with pytest.raises(FolderError, match=r"^RAY_TMPDIR, .*file.*Not a directory"):
        own_folder()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_the_folder_of_another_user_is_named_with_its_owner(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short.chmod(0o755)
    (short / "ray").mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(short))
    told = refused_as_nobody()
    assert f"RAY_TMPDIR, the folder for Ray's sockets and logs, cannot be used: {short}/ray" in told
    assert f"Permission denied ({short}/ray belongs to root)" in told


def refused_as_nobody() -> str:
    """The message that another user gets."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.setgroups([])
        os.setuid(NOBODY)
        try:
            os.write(writer, own_folder([]).encode())
        except FolderError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as told:
        return told.read()
