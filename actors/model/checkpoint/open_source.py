"""Opens a checkpoint of any supported format."""

from __future__ import annotations

from pathlib import Path

from actors.model.checkpoint.gguf_source import GgufSource
from actors.model.checkpoint.safetensors_source import SafetensorsSource
from actors.model.checkpoint.source import TensorSource
from placement.checkpoint.header import is_safetensors, read_tensors
from placement.model.spec import ModelSpec


def open_source(path: str | Path, spec: ModelSpec) -> TensorSource:
    """Return an open source of the tensors of a Hugging Face folder, a ``.safetensors`` file or a ``.gguf`` file of the model
    `spec`. Only headers are read. The caller closes it.

    Raises `ModelError` if the file does not exist, has another format, or is damaged.
    """
    path = Path(path)
    return SafetensorsSource(read_tensors(path, spec)) if is_safetensors(path) else GgufSource(path, spec)
