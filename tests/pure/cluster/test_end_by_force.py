"""A cluster that does not end is ended."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[3]
STUCK = """
import subprocess, sys, time
from serve_app.commands.serve_command import _end_by_force_after
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
_end_by_force_after(0.2)
time.sleep(600)
"""


def test_what_does_not_end_in_time_is_killed_with_its_children() -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", STUCK], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("did not end within 0.2 s; its processes were killed")
    assert not psutil.pid_exists(int(done.stdout)) or psutil.Process(int(done.stdout)).status() == psutil.STATUS_ZOMBIE
    assert time.monotonic() - began < 100
