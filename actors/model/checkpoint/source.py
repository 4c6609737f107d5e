"""What a checkpoint is to the loader: named tensors, of which slices can be read.

load ── TensorSource ─┬─ SafetensorsSource   a Hugging Face folder, or one .safetensors file
                      └─ GgufSource          a .gguf file: other names, quantised, q and k rows permuted
"""

from __future__ import annotations

import re
from typing import Protocol

from torch import Tensor

from placement.model_spec import ModelSpec

_AUXILIARY = re.compile(
    r"(.*\.)?rotary_emb\.inv_freq"  # Hugging Face: computed from the config; old checkpoints saved it all the same
    r"|rope_(freqs|factors_long|factors_short)\.weight"  # GGUF: rope scaling, read by `placement.gguf_rope`
    r"|blk\.\d+\.attn_rot_embd\.weight"  # GGUF: old converters' copy of inv_freq
)


class TensorSource(Protocol):
    """A checkpoint, by the Hugging Face names that `placement.shards` uses. Tensors it has no such name for keep their own."""

    location: str
    """Path of the file or folder, for messages."""

    def names(self) -> set[str]:
        """Every tensor in the checkpoint."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape of a tensor. Raises `ModelError` if its type is one that cannot be read as a float."""

    def where(self, name: str) -> str:
        """The file a tensor is in, and its name there where that differs; for messages."""

    def fill(self, name: str, dim: int, take: range, target: Tensor) -> None:
        """Write ``tensor.narrow(dim, take.start, len(take))`` into `target`: same shape, not empty, any float type, any device.

        Only the slice is read, and no more than a small chunk of it is ever in memory beside `target`.
        """

    def close(self) -> None:
        """Unmap the files. Calling twice is harmless."""


def ignorable(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor may be left unread: it repeats what the spec says, or is a second copy of a tied embedding."""
    return _AUXILIARY.fullmatch(name) is not None or (spec.tie_embeddings and name == "lm_head.weight")
