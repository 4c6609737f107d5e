"""The tensor directory of a checkpoint: the names, files and shapes of its tensors. Only headers are read.

    safetensors headers ── placement.checkpoint.hf.safetensors_file ─┐
                                                                     ├──→ TensorDirectory ──→ check: all present, in the
    GGUF header ────────── placement.checkpoint.gguf.tensors ────────┘                        right shapes, nothing else

The ranks check it before they load weights, and the commands before they start any rank.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from placement.model.spec import ModelError, ModelSpec
from placement.ownership.shard import Shard
from placement.ownership.shards import parameters, whole_model

_AUXILIARY = re.compile(
    r"(.*\.)?rotary_emb\.inv_freq"  # Hugging Face: computed from the config; old checkpoints contain it nevertheless
    r"|rope_(freqs|factors_long|factors_short)\.weight"  # GGUF: RoPE scaling, read by `placement.checkpoint.gguf.rope`
    r"|blk\.\d+\.attn_rot_embd\.weight"  # GGUF: old converters' copy of inv_freq
)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class TensorEntry:
    """One tensor. `shape` is in Hugging Face order: ``[outputs, inputs]`` for a matrix."""

    file: Path
    stored_name: str
    """Name of the tensor in its file."""
    shape: tuple[int, ...]
    dtype: str
    """Type of the values as the file names it, for example ``BF16`` or ``Q4_1``."""
    data: range
    """The bytes of the file that hold the values."""
    unreadable: str | None = None
    """Reason why the values cannot be read as floats, written as the end of a sentence; None if they can."""


@dataclass(frozen=True)
class TensorDirectory:
    """Every tensor of the checkpoint at `location` (a file or folder).

    The keys are the Hugging Face names that `placement.ownership.shards` uses. A tensor without such a name keeps its own.
    """

    location: Path
    tensors: Mapping[str, TensorEntry]
    promised: Mapping[str, Path] = field(default_factory=dict)
    """The files of the tensors that an index names, but that no file has."""


def check(directory: TensorDirectory, spec: ModelSpec, own: Shard) -> None:
    """Check that a checkpoint has all tensors of one rank, in the right shapes, and no tensor that no rank of the model needs.

    `own` is the rank's shard: the layers, heads and columns that it holds. Raises `ModelError`, which names the file and the
    tensor, if a tensor is unexpected, missing, of a type that cannot be read, or of another shape than `spec` gives it.
    """
    names = directory.tensors.keys()
    used = {weight_slice.source for parameter in parameters(spec, whole_model(spec)) for weight_slice in parameter.slices}
    unexpected = {name for name in names - used if not _ignorable(name, spec)}
    if unexpected:
        raise ModelError(
            f"{directory.location}: {len(unexpected)} tensors that a {spec.family} model with these settings has no place "
            f"for: {some(unexpected)}"
        )
    needed = {
        weight_slice.source: weight_slice.source_shape
        for parameter in parameters(spec, own)
        for weight_slice in parameter.slices
    }
    missing = needed.keys() - names
    if missing:
        raise ModelError(f"{directory.location}: {_missing(directory, own, missing)}")
    for name, shape in needed.items():
        _check_entry(name, directory.tensors[name], shape)


def _missing(directory: TensorDirectory, own: Shard, missing: set[str]) -> str:
    text = f"{len(missing)} tensors of {_part(own)} are missing: {some(missing)}"
    promised = sorted(missing & directory.promised.keys())
    if promised:
        text += f". The index names {directory.promised[promised[0]].name} for {promised[0]}, but that file does not have it"
    return text


def _check_entry(name: str, entry: TensorEntry, shape: tuple[int, ...]) -> None:
    if entry.unreadable is not None:
        raise ModelError(f"{entry.file}: tensor {entry.stored_name} {entry.unreadable}")
    if entry.shape != shape:
        where = str(entry.file) if entry.stored_name == name else f"{entry.file}: {entry.stored_name}"
        raise ModelError(
            f"{where}: tensor {name} has shape {list(entry.shape)}, but the model's settings make it {list(shape)}"
        )


def _ignorable(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor may stay unread: it repeats a value of the spec, is a second copy of a tied embedding, or belongs to a
    multi-token prediction (MTP) layer."""
    if _AUXILIARY.fullmatch(name) is not None or (spec.tie_embeddings and name == "lm_head.weight"):
        return True
    if spec.mtp_layers and name.startswith("model.mtp."):
        return True
    layer = _LAYER.match(name)
    return layer is not None and 0 <= int(layer[1]) - spec.num_layers < spec.mtp_layers


def _part(own: Shard) -> str:
    """Returns a description of the part of the model that a rank holds."""
    stage = {(True, True): "the only stage", (True, False): "the first stage", (False, True): "the last stage"}
    return f"layers {own.layers.start}-{own.layers.stop - 1} ({stage.get((own.first_stage, own.last_stage), 'a middle stage')})"


def some(names: Collection[str]) -> str:
    """Returns the first three of `names` in alphabetical order as text, followed by the number of the others: ``a, b, c and 2
    more``; ``none`` if there are no names."""
    shown = ", ".join(sorted(names)[:3]) or "none"
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
