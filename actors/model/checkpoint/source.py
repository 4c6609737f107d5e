"""The checkpoint interface of the loader: named tensors, of which slices can be read.

load ── TensorSource ─┬─ SafetensorsSource   a Hugging Face folder, or one .safetensors file
                      └─ GgufSource          a .gguf file: other names, quantised, q and k rows permuted
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from placement.checkpoint.directory.tensor_directory import TensorDirectory


class TensorSource(Protocol):
    """A checkpoint. `directory` names its tensors, and `fill` reads them by those names."""

    directory: TensorDirectory

    def fill(self, name: str, dim: int, take: range, target: Tensor, slot: int | None = None) -> None:
        """Write ``tensor.narrow(dim, take.start, len(take))`` of the tensor `name`, a key of ``directory.tensors`` (`KeyError`
        otherwise), into `target`: same shape, not empty, any float dtype, any device.

        If `take` has a step, only every step-th element along `dim` is read. With `slot`, the tensor is ``tensor[slot]``, for
        tensors that stack one matrix per expert. Only the slice is read, and at most a small chunk of it is in memory besides
        `target`.
        """

    def close(self) -> None:
        """Unmap the files; `fill` must not be called again. A second call has no effect."""
