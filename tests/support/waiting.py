"""Wait for what a test has caused, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_until(happened: Callable[[], Any], timeout_s: float, otherwise: Callable[[], str], every_s: float = 0.05) -> Any:
    """The first true value of `happened()`, asked for every `every_s`; fails with `otherwise()` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = happened()
        if value:
            return value
        time.sleep(every_s)
    raise AssertionError(otherwise())
