"""Ray that does not start in time is started once more, and what the first try has left is killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from cluster.embedded.second_try import StartTimeout, is_timeout, started

LATE = Exception("The current node timed out during startup. This could happen because ... the GCS has become overloaded.")
"""What Ray raises."""


def failing(*errors: Exception) -> Callable[[], str]:
    left = list(errors)

    def start() -> str:
        if left:
            raise left.pop(0)
        return "runs"

    return start


@pytest.mark.parametrize(
    "late", [LATE, TimeoutError("Timed out while waiting for nodes to join."), RuntimeError("Timed out waiting for node info")]
)
def test_what_was_late_once_is_started_again(late: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    cleaned: list[int] = []
    assert started(failing(late), lambda: cleaned.append(1)) == "runs"
    assert cleaned == [1]
    told = capsys.readouterr().err
    assert str(late).splitlines()[0].rstrip(".") in told
    assert "trying once more" in told


def test_what_is_late_twice_is_refused_with_what_timed_out_and_how_busy_it_is() -> None:
    with pytest.raises(StartTimeout, match=r"in two tries: The current node timed out.* load of the machine is \d.* \d+ CPUs?"):
        started(failing(LATE, LATE), lambda: None)


def test_an_error_of_another_kind_is_raised_at_once() -> None:
    first, second = ValueError("no such address"), OSError("no space left on device")
    with pytest.raises(ValueError, match="no such address"):
        started(failing(first), lambda: None)
    with pytest.raises(OSError, match="no space"):
        started(failing(LATE, second), lambda: None)


def test_a_cause_further_down_counts() -> None:
    error = RuntimeError("cannot start")
    assert not is_timeout(error)
    error.__cause__ = TimeoutError("late")
    assert is_timeout(error)


def test_processes_of_the_first_try_are_killed_and_earlier_ones_are_not() -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    earlier = subprocess.Popen(sleep)
    made: list[subprocess.Popen[bytes]] = []

    def start() -> str:
        if made:
            return "runs"
        made.append(subprocess.Popen(sleep))
        raise LATE

    def clean_up() -> None:
        raise RuntimeError("half of it never started")

    try:
        assert started(start, clean_up) == "runs"
        assert made[0].wait(10) == -9
        assert earlier.poll() is None
    finally:
        earlier.kill()
        earlier.wait()
