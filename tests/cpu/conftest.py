"""Leaves the later cases of parametrised tests to `make test-all`, so that `make test` touches everything in a few minutes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from actors.model.kernels.native import library

_CASES = 3
"""Cases of one test that `make test` runs: the first ones. Those marked `long` do not count."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each case of a parametrised test below this folder as `long`, but the first ones."""
    here, seen = Path(__file__).parent, Counter[str]()
    for item in items:
        if not item.path.is_relative_to(here) or item.get_closest_marker("long"):
            continue
        test = item.nodeid.split("[")[0]
        seen[test] += 1
        if seen[test] > _CASES:
            item.add_marker("long")


def pytest_sessionstart() -> None:
    """Use the CPU kernels that ``tests/conftest.py`` has chosen, in tests that build layers without a rank as well."""
    library.start()
