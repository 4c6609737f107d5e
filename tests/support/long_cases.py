"""Marks the cases of a parametrised test that take long and prove what its other cases prove."""

from __future__ import annotations

from typing import Any

import pytest


def long(*cases: Any) -> list[Any]:
    """These cases as `pytest.mark.long`: `make test-all` runs them and `make test` does not. A tuple is one case's values."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long) for case in cases]
