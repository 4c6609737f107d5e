"""Lets tests import what they share as `tests.<name>`: the repository root goes on the path (there is no `tests` package)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
