"""The compiled kernels as functions of tensors, and whether this process uses them.

`start` compiles and loads the kernels in the background, while a rank reads its weights; `wait` ends when they are there. The
environment variable ``SHARDWRIGHT_KERNELS`` chooses whether they are used:

    auto       (default) if they can be compiled; else torch's kernels, with one warning
    native     an error if they cannot be compiled
    torch      never

The functions take CPU tensors of one type, bfloat16 or float32, whose last dimension is contiguous. They do not check shapes:
their callers are the modules that own an operation, which ask for the `library` in each call.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from actors.model.kernels.native.compiler import CompileError, compiled

log = logging.getLogger("shardwright.kernels")

PACK_SIDE = 32
"""Outputs and inputs of one block of a packed weight."""
MODES = ("auto", "native", "torch")
_SUFFIXES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = {
    "rms_norm": (_POINTER, _INT, _INT, _POINTER, _FLOAT, _POINTER, _INT, _INT, _INT),
    "add": (_POINTER, _POINTER, _INT, _POINTER, _INT, _INT),
    "silu_mul": (_POINTER, _INT, _POINTER, _INT, _INT),
    "rotate": (_POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT),
    "write_plane": (_POINTER, _INT, _INT, _POINTER, _POINTER, _INT, _INT, _INT, _INT),
    "paged_attention": (
        *(_POINTER, _INT, _INT, _POINTER, _POINTER, *[_INT] * 4),
        *(_POINTER, _INT, _POINTER, _POINTER, _FLOAT, _FLOAT, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT),
    ),
    "linear": (_POINTER, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT),
}
_NUMBERS = {name: number for number, name in enumerate(_ARGUMENTS)}
"""The numbers of the kernels in a `Call`, as ``run_call`` in ``kernels.cpp`` has them."""

Argument = int | float | None
"""An argument of a kernel: an address (None: null), a number of elements, or a factor."""


class Call(ctypes.Structure):
    """A recorded call of a kernel: ``Call`` of ``kernels.cpp``."""

    _fields_ = [
        ("kernel", ctypes.c_int64),
        ("is_float32", ctypes.c_int64),
        ("words", ctypes.c_int64 * 22),
        ("floats", ctypes.c_double * 2),
    ]

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, arguments: Sequence[Argument]) -> Call:
        """Return the call of the kernel `name` for tensors of `dtype`."""
        kinds = _ARGUMENTS[name]
        words = [int(given or 0) for given, kind in zip(arguments, kinds, strict=True) if kind is not _FLOAT]
        floats = [float(given or 0) for given, kind in zip(arguments, kinds, strict=True) if kind is _FLOAT]
        return cls(_NUMBERS[name], dtype is torch.float32, (ctypes.c_int64 * 22)(*words), (ctypes.c_double * 2)(*floats))


class CallRecorder(Protocol):
    """Records the calls of a thread (`actors.model.kernels.native.program`)."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor, contiguous, whose memory belongs to the record."""

    def add(self, call: Call) -> None:
        """Add `call`, which has just run, to the record."""

    def add_python(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return ``function(x)`` in memory of the record, to which the call is added."""


class _OfThread(threading.local):
    recorder: CallRecorder | None = None


OF_THREAD = _OfThread()
"""The recorder of this thread."""


class Library:
    """The functions of one compiled library."""

    def __init__(self, path: Path) -> None:
        """Load the library. Raises `OSError` if this cannot be done."""
        loaded = ctypes.CDLL(str(path))
        self.packs = bool(loaded.has_linear())
        """Whether there are `pack` and `linear`: the CPU needs AVX-512 with bfloat16 instructions."""
        loaded.pack_weight.argtypes, loaded.pack_weight.restype = (_POINTER, _POINTER, _INT, _INT), None
        loaded.run_calls.argtypes, loaded.run_calls.restype = (_POINTER, _INT), None
        self._pack, self._run_calls = loaded.pack_weight, loaded.run_calls
        self._functions: dict[tuple[str, torch.dtype], Callable[..., None]] = {}
        for name, arguments in _ARGUMENTS.items():
            for dtype, suffix in _SUFFIXES.items():
                function = getattr(loaded, name if name == "linear" else f"{name}_{suffix}")
                function.argtypes, function.restype = arguments, None
                self._functions[name, dtype] = function

    def pack(self, weight: Tensor) -> Tensor:
        """Return `weight` [..., outputs, inputs] bfloat16, contiguous, as `linear` reads it: [..., outputs / 32, inputs / 32,
        2, 16, 32]. Outputs and inputs must be multiples of 32."""
        outputs, inputs = weight.shape[-2:]
        packed = weight.new_empty(*weight.shape[:-2], outputs // PACK_SIDE, inputs // PACK_SIDE, 2, 16, 32)
        for plain, to in zip(weight.view(-1, outputs, inputs), packed.view(-1, outputs * inputs), strict=True):
            self._pack(plain.data_ptr(), to.data_ptr(), outputs, inputs)
        return packed

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias`` [rows, outputs] for `x` [rows, inputs], the `packed` form of one weight [outputs,
        inputs], and `bias` [outputs], all bfloat16. Sums are in fp32, and are rounded once."""
        x = x if x.stride(1) == 1 else x.contiguous()
        rows, outputs, inputs = x.shape[0], packed.shape[0] * PACK_SIDE, packed.shape[1] * PACK_SIDE
        out = _empty((rows, outputs), x.dtype)
        added = None if bias is None else bias.data_ptr()
        self._call(
            "linear", x.dtype, x.data_ptr(), x.stride(0), packed.data_ptr(), added, out.data_ptr(), rows, outputs, inputs
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return `x` [rows, width] or [rows, heads, width] normed over its last dimension (RMS) and multiplied by `weight`
        [width]."""
        rows, width, heads = x.shape[0], x.shape[-1], x.shape[1] if x.dim() == 3 else 1
        out = _empty(x.shape, x.dtype)
        strides = (x.stride(0), x.stride(1) if x.dim() == 3 else width)
        self._call("rms_norm", x.dtype, x.data_ptr(), *strides, weight.data_ptr(), eps, out.data_ptr(), rows, heads, width)
        return out

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """Return ``a + b``, both [rows, width]. `a` is contiguous; the rows of `b` may be one row, expanded."""
        out = _empty(a.shape, a.dtype)
        self._call("add", a.dtype, a.data_ptr(), b.data_ptr(), b.stride(0), out.data_ptr(), *a.shape)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return ``silu(gate) * up`` [rows, width] for `gate_up` [rows, 2 * width], the two side by side."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = _empty((rows, width), gate_up.dtype)
        self._call("silu_mul", gate_up.dtype, gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), rows, width)
        return out

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return `x` [rows, heads, dim] rotated by halves: the angles of `cos` and `sin`, fp32 [rows, 1, dim], contiguous, with
        the first half of `sin` negated."""
        rows, heads, dim = x.shape
        out = _empty((rows, heads, dim), x.dtype)
        angles = (cos.data_ptr(), sin.data_ptr())
        self._call("rotate", x.dtype, x.data_ptr(), x.stride(0), x.stride(1), *angles, out.data_ptr(), rows, heads, dim)
        return out

    def write_plane(self, x: Tensor, slots: Tensor, plane: Tensor) -> None:
        """Store `x` [rows, heads, dim] in `plane` [heads, slots of the cache, dim], contiguous, at `slots` [rows] int64, but
        not where the slot is negative."""
        rows, heads, dim = x.shape
        places = (slots.data_ptr(), plane.data_ptr())
        self._call("write_plane", x.dtype, x.data_ptr(), x.stride(0), x.stride(1), *places, rows, heads, plane.shape[1], dim)

    def paged_attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        firsts: Tensor,
        stops: Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Return attention from one query a row, `q` [rows, q_heads, key_dim], to the tokens ``[firsts, stops)`` of the row,
        whose blocks `tables` names: [rows, q_heads, value_dim]. The output of a row without tokens is undefined.

        `keys` and `values` are pages [kv_heads, num_blocks, block_size, dim of each], contiguous. `tables` [rows, blocks],
        `firsts` and `stops` [rows] are int32; tokens are counted from the first block of the row's table. `softcap` and `sinks`
        are those of `actors.model.attention.params`. The log-sum-exp is written to `lse` [rows, q_heads] fp32.
        """
        rows, q_heads, key_dim = q.shape
        kv_heads, num_blocks, block_size, value_dim = values.shape
        out = _empty((rows, q_heads, value_dim), q.dtype)
        self._call(
            *("paged_attention", q.dtype, q.data_ptr(), q.stride(0), q.stride(1), keys.data_ptr(), values.data_ptr()),
            *(num_blocks * block_size, block_size, key_dim, value_dim),
            *(tables.data_ptr(), tables.stride(0), firsts.data_ptr(), stops.data_ptr(), scale, softcap or 0.0),
            *(None if sinks is None else sinks.data_ptr(), out.data_ptr(), None if lse is None else lse.data_ptr()),
            *(rows, q_heads, kv_heads),
        )
        return out

    def run_calls(self, calls: ctypes.Array[Call]) -> None:
        """Run recorded kernel calls, in order, in one call of the library. The memory at their addresses must still be
        allocated: nothing is checked."""
        self._run_calls(ctypes.addressof(calls), len(calls))

    def _call(self, name: str, dtype: torch.dtype, *arguments: Argument) -> None:
        self._functions[name, dtype](*arguments)
        if OF_THREAD.recorder is not None:
            OF_THREAD.recorder.add(Call.of(name, dtype, arguments))


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    recorder = OF_THREAD.recorder
    return torch.empty(shape, dtype=dtype) if recorder is None else recorder.empty(shape, dtype)


class _State:
    """The kernels of this process."""

    def __init__(self) -> None:
        self.library: Library | None = None
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None
        self.required = False
        self.lock = threading.Lock()


_STATE = _State()


class OnDevice(Protocol):
    """A tensor, or anything else with one type and one device."""

    @property
    def dtype(self) -> torch.dtype:
        """Its type."""
        ...

    @property
    def device(self) -> torch.device:
        """Its device."""
        ...


def library(x: OnDevice) -> Library | None:
    """Return the compiled kernels, if this process uses them and they take tensors like `x`: on a CPU, bfloat16 or float32."""
    loaded = _STATE.library
    return loaded if loaded is not None and x.dtype in _SUFFIXES and x.device.type == "cpu" else None


def start(mode: str | None = None) -> None:
    """Begin to compile and load the kernels in the background, unless that has begun before. `mode` is one of `MODES` (None:
    that of the environment). Raises `ValueError` for another mode."""
    mode = mode or os.environ.get("SHARDWRIGHT_KERNELS") or "auto"
    if mode not in MODES:
        raise ValueError(f"SHARDWRIGHT_KERNELS must be one of {', '.join(MODES)}, not {mode!r}")
    if mode == "torch":
        return
    with _STATE.lock:
        if _STATE.thread is None:
            _STATE.thread = threading.Thread(target=_load, name="compile kernels", daemon=True)
            _STATE.thread.start()
    _STATE.required = mode == "native"


def wait() -> None:
    """Wait until the kernels that `start` compiles can be used. Raises `CompileError` if they must be used and cannot be."""
    if _STATE.thread is not None:
        _STATE.thread.join()
    if _STATE.error is not None and _STATE.required:
        raise CompileError(str(_STATE.error)) from _STATE.error


def _load() -> None:
    try:
        _STATE.library = Library(compiled())
    except (CompileError, OSError, AttributeError) as error:
        _STATE.error = error
        log.warning("the compiled CPU kernels are not used, which makes decoding slower: %s", error)
