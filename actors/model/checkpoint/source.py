"""What a checkpoint is to the loader: named tensors, of which slices can be read.

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
        """Write ``tensor.narrow(dim, take.start, len(take))`` into `target`: same shape, not empty, any float type, any device.

        Where `take` has a step, every so many of these; with `slot`, of ``tensor[slot]``. Only the slice is read, and no more
        than a small chunk of it is ever in memory beside `target`.
        """

    def close(self) -> None:
        """Unmap the files. Calling twice is harmless."""
