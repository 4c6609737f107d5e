"""Compiles `kernels.cpp` for the CPU of this machine, once, into the user's cache folder.

    ~/.cache/shardwright/kernels/HASH.so       a hash of the source, the compiler's version, its flags and the CPU's features

Ranks that start together wait for the first of them. It takes about 3 s.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-mprefer-vector-width=512", "-fopenmp", "-fPIC", "-shared"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)
_CPU_FACTS = Path("/proc/cpuinfo")
_TIMEOUT_S = 300.0


class CompileError(RuntimeError):
    """The kernels cannot be compiled on this machine. The message says why, and what to install."""


def compiled(env: Mapping[str, str] = os.environ) -> Path:
    """Return the shared library of the kernels, compiled first if the cache does not have it. Waits while another process
    compiles it.

    The compiler is ``$CXX``, else ``g++`` or ``clang++``. Raises `CompileError` if there is none, or if it fails.
    """
    compiler = _compiler(env)
    folder = _cache_folder(env)
    library = folder / f"{_identity(compiler)}.so"
    if library.exists():
        return library
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(compiler, library)
    return library


def _compiler(env: Mapping[str, str]) -> str:
    for name in (env.get("CXX"), "g++", "clang++"):
        if name and (found := shutil.which(name, path=env.get("PATH"))):
            return found
    raise CompileError("there is no C++ compiler (g++ or clang++); on Debian and Ubuntu: apt-get install g++")


def _cache_folder(env: Mapping[str, str]) -> Path:
    """Return the folder of the user's cache, or a new temporary one where that cannot be written."""
    base = env.get("XDG_CACHE_HOME") or (str(Path(env["HOME"]) / ".cache") if env.get("HOME") else "")
    if base:
        folder = Path(base) / "shardwright" / "kernels"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
    return Path(tempfile.mkdtemp(prefix="shardwright-kernels-"))


def _identity(compiler: str) -> str:
    """Return a hash of everything that the compiled code depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=False).stdout
    parts = [SOURCE.read_bytes(), compiler.encode(), version, " ".join(_FLAGS).encode(), _cpu_features()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def _cpu_features() -> bytes:
    try:
        lines = _CPU_FACTS.read_bytes().splitlines()
    except OSError:
        return b""
    return b"\n".join(next((x for x in lines if x.startswith(name)), b"") for name in (b"model name", b"flags", b"Features"))


def _compile(compiler: str, library: Path) -> None:
    made = library.with_suffix(f".{os.getpid()}.tmp")
    command = [compiler, *_FLAGS, str(SOURCE), "-o", str(made)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{' '.join(command)} did not end: {error}") from error
    if done.returncode:
        made.unlink(missing_ok=True)
        raise CompileError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    made.replace(library)
