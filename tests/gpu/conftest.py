"""Every test here needs a CUDA device, and is skipped where torch finds none."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def device() -> torch.device:
    """The device the tests of this folder run on."""
    if not torch.cuda.is_available():
        pytest.skip(f"needs a CUDA device, and torch {torch.__version__} finds none")
    return torch.device("cuda")
