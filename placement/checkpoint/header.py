"""Reads a `ModelSpec` and the tensor directory from the headers of a checkpoint (Hugging Face or GGUF).

No weight is read, except to find out whether an LM head equals the embedding.
"""

from __future__ import annotations

from pathlib import Path

from placement.checkpoint.directory.tensor_directory import TensorDirectory, check
from placement.checkpoint.directory.tied_head import with_embedding
from placement.checkpoint.gguf import gguf_header
from placement.checkpoint.gguf import tensors as gguf_tensors
from placement.checkpoint.gguf.split import holds_gguf
from placement.checkpoint.hf import config_json, safetensors_file
from placement.model.spec import ModelError, ModelSpec
from placement.ownership.shards import whole_model


def read(path: str | Path) -> ModelSpec:
    """Returns the specification of the model in a Hugging Face folder (with a ``config.json``), in a GGUF file, or in any part
    or the folder of a split GGUF file, from the headers. If the config ties the LM head to the embedding and the files hold
    both, the two are compared.

    Raises `ModelError`, which names the file and the field at fault, if there is no model at `path`, or if it is damaged,
    incomplete or not supported; `OSError` if a GGUF file cannot be opened.
    """
    path = Path(path)
    if holds_gguf(path):
        return gguf_header.read(path)
    if path.is_dir():
        return config_json.read(path)
    if not path.exists():
        raise ModelError(f"there is no model at {path}: expected a Hugging Face folder with a config.json, or a GGUF file")
    if not gguf_header.is_gguf(path):
        raise ModelError(f"{path} is neither a folder nor a GGUF file (a GGUF file starts with the letters GGUF)")
    return gguf_header.read(path)


def is_safetensors(path: Path) -> bool:
    """Whether the weights at `path` are safetensors (a folder, or a ``.safetensors`` file); False means GGUF (a file, or a
    folder of such files). Raises `ModelError` if nothing is at `path`, or another kind of file, and `OSError` if that file
    cannot be opened."""
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder")
    if path.is_dir() or path.suffix == ".safetensors":
        return not holds_gguf(path)
    if path.suffix == ".gguf" or gguf_header.is_gguf(path):
        return False
    raise ModelError(f"{path}: not a checkpoint; give a folder with .safetensors files, a .safetensors file or a .gguf file")


def read_tensors(path: Path, spec: ModelSpec) -> TensorDirectory:
    """Returns the tensors of a Hugging Face folder, a ``.safetensors`` file or a GGUF file, after a check that all data is
    present.

    `spec` is the model in the checkpoint; the names of GGUF tensors depend on it, and whether the LM head serves as the
    embedding, too (`placement.checkpoint.directory.tied_head`). Raises `ModelError`, which names the
    file at fault, if `path` is not a checkpoint, if weights are absent (`AbsentWeights`), or if a file is damaged or
    incomplete.
    """
    if is_safetensors(path):
        return with_embedding(safetensors_file.read_directory(path), spec)
    return gguf_tensors.directory(path, gguf_tensors.read_sound_model(path), spec)


def check_tensors(path: Path, spec: ModelSpec) -> None:
    """Check that the checkpoint at `path` is complete and has exactly the tensors that the ranks of `spec` need together.

    Raises `ModelError`, which names the file and the tensor at fault, if files or tensors are absent, damaged, unexpected, of a
    type that cannot be read, or of the wrong shape.
    """
    check(read_tensors(path, spec), spec, whole_model(spec))
