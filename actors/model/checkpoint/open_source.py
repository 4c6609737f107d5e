"""Open a checkpoint, whatever its format."""

from __future__ import annotations

from pathlib import Path

from actors.model.checkpoint.gguf_source import GgufSource
from actors.model.checkpoint.safetensors_source import SafetensorsSource
from actors.model.checkpoint.source import TensorSource
from placement.gguf_file import is_gguf
from placement.model_spec import ModelError, ModelSpec


def open_source(path: str | Path, spec: ModelSpec) -> TensorSource:
    """Open a Hugging Face folder, a ``.safetensors`` file or a ``.gguf`` file.

    Raises `ModelError` if it is not there, is not one of these, or is damaged.
    """
    path = Path(path)
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder")
    if path.is_dir() or path.suffix == ".safetensors":
        return SafetensorsSource(path)
    if path.suffix == ".gguf" or is_gguf(path):
        return GgufSource(path, spec)
    raise ModelError(f"{path}: not a checkpoint; give a folder with .safetensors files, a .safetensors file or a .gguf file")
