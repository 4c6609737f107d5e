"""The files that `k8s/render.py` writes, without writing them."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


@cache
def overlays() -> dict[str, str]:
    """Text of every file, by its path below the repository."""
    found = importlib.util.spec_from_file_location("render_overlays_script", ROOT / "k8s" / "render.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    texts: dict[str, str] = module.texts()
    return texts
