"""Reads what a model is from its checkpoint's own header. No weight is touched."""

from __future__ import annotations

from pathlib import Path

from placement import config_json, gguf_header
from placement.model_spec import ModelError, ModelSpec


def read(path: str | Path) -> ModelSpec:
    """The model in a Hugging Face folder (with a ``config.json``) or in a GGUF file.

    Raises `ModelError`, which names the file and the field at fault.
    """
    path = Path(path)
    if path.is_dir():
        return config_json.read(path)
    if not path.exists():
        raise ModelError(f"there is no model at {path}: expected a Hugging Face folder with a config.json, or a GGUF file")
    if not gguf_header.is_gguf(path):
        raise ModelError(f"{path} is neither a folder nor a GGUF file (a GGUF file starts with the letters GGUF)")
    return gguf_header.read(path)
