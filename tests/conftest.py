"""Lets tests import what they share as `tests.<name>`: the repository root goes on the path (there is no `tests` package).

Where tests run side by side, each process keeps to one core: barriers between threads cost most where cores are taken.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# All tests run with the compiled CPU kernels where they can be compiled: none should depend on when they are ready. With
# SHARDWRIGHT_KERNELS=torch all run with torch's.
if "SHARDWRIGHT_KERNELS" not in os.environ:
    from actors.model.kernels.native.compiler import CompileError, compiled

    try:
        compiled()
        os.environ["SHARDWRIGHT_KERNELS"] = "native"
    except CompileError:
        os.environ["SHARDWRIGHT_KERNELS"] = "torch"
