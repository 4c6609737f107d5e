"""A program: the calls of compiled kernels that a computation makes, recorded once and run again without Python.

Recording runs the computation as usual, and notes each kernel with the addresses of its tensors, as a CUDA graph does. To run
the program again, fill the tensors that it was recorded on, and call `run`; the results are in the tensors that the recorded
run returned::

    recorded once      norm(a) -> b     linear(b) -> c     all-reduce(c) -> d     add(a, d) -> e      ...
    run                [ norm, linear ] in one call,       all-reduce in Python,  [ add, ... ] in one call

Whatever is not a kernel of ours would be missed. So recording refuses every operator of torch that computes something; views
are free, and collectives go through `in_program`. Memory of tensors is reused within the program as it was when recorded, and
by nothing else.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from actors.model.kernels.native.library import OF_THREAD, Call, Library

_ALIGNMENT = 64


class NotRecordable(RuntimeError):
    """The computation uses an operator that a program cannot contain."""


class Program:
    """The recorded calls of one computation, and the memory that they use; the `CallRecorder` of that computation."""

    def __init__(self, native: Library) -> None:
        self._native = native
        self._calls: list[Call] = []
        self._parts: list[Callable[[], None]] = []
        self._free: defaultdict[int, list[np.ndarray[Any, Any]]] = defaultdict(list)
        self._memory: list[np.ndarray[Any, Any]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the program keeps for its tensors."""
        return sum(memory.nbytes for memory in self._memory)

    def record(self, compute: Callable[[], Tensor]) -> Tensor:
        """Run `compute`, record its calls, and return its result, which every later `run` overwrites. Called once.

        Raises `NotRecordable`, after a part of `compute` has run, if it contains anything else.
        """
        OF_THREAD.recorder = self
        try:
            with _OnlyViews():  # type: ignore[no-untyped-call]
                result = compute()
        finally:
            OF_THREAD.recorder = None
        self._end_part()
        self._result = result
        return result

    def run(self) -> Tensor:
        """Run the recorded calls again. Returns the tensor that `record` returned."""
        for part in self._parts:
            part()
        return self._result

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `CallRecorder.empty`."""
        with _disable_current_modes():
            return torch.from_numpy(self._take(prod(shape) * dtype.itemsize)).view(dtype).view(tuple(shape))

    def add(self, call: Call) -> None:
        """See `CallRecorder.add`."""
        self._calls.append(call)

    def add_python(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """See `CallRecorder.add_python`."""
        with _disable_current_modes():
            found = function(x)
            out = self.empty(found.shape, found.dtype).copy_(found)
        self._end_part()

        def again() -> None:
            out.copy_(function(x))

        self._parts.append(again)
        return out

    def _end_part(self) -> None:
        if self._calls:
            calls = (Call * len(self._calls))(*self._calls)
            self._calls.clear()
            self._parts.append(lambda: self._native.run_calls(calls))

    def _take(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Return memory of at least `nbytes` bytes that no living tensor of the program uses."""
        size = max(_ALIGNMENT, 1 << (nbytes - 1).bit_length())
        if not self._free[size]:
            whole = np.empty(size + _ALIGNMENT, np.uint8)
            self._memory.append(whole)
            start = -whole.ctypes.data % _ALIGNMENT
            self._free[size].append(whole[start : start + size])
        memory = self._free[size].pop()
        lent = memory[:nbytes]  # lives as long as the storage of the tensor that is made of it
        weakref.finalize(lent, self._free[size].append, memory)
        return lent


def in_program(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return ``function(x)``, where `function` is a collective. If this thread records a program, each run of the program calls
    it."""
    recorder = OF_THREAD.recorder
    return function(x) if recorder is None else recorder.add_python(function, x)


class _OnlyViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators that compute or allocate."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchDispatchMode`."""
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, (list, tuple)) else [result]
        if func._schema.is_mutable or not _storages(made) or not _storages(made) <= _storages(args):
            raise NotRecordable(f"{func} computes something")
        return result


def _storages(values: Any) -> set[int]:
    """Return the addresses of the storages of all tensors in the list `values`, and in lists in it."""
    found = set[int]()
    for value in values:
        if isinstance(value, Tensor) and not value.is_mkldnn:
            found.add(value.untyped_storage().data_ptr())
        elif isinstance(value, (list, tuple)):
            found |= _storages(value)
    return found
