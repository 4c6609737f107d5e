"""Tied embeddings: which tensors of a checkpoint count when its config says that the LM head is the embedding.

As in transformers 5 (`PreTrainedModel.tie_weights`), what the files hold decides:

    in the files               embedding              LM head
    embedding                  embedding              embedding
    head                       head                   head
    both, equal                embedding              embedding
    both, not equal            embedding              head          not tied, whatever the config says
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from placement.checkpoint.directory.tensor_directory import TensorDirectory, TensorEntry
from placement.model.spec import ModelSpec

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_RUN_BYTES = 1 << 20


def is_tied(directory: TensorDirectory) -> bool:
    """Whether a model is tied whose config says so and whose tensors are those of `directory`: not if the LM head is in the
    files too and differs from the embedding.

    Equal ones are read whole from the files, unlike ones up to the first difference. Raises `OSError` if a file cannot be read.
    """
    embedding, head = (directory.tensors.get(name) for name in (_EMBEDDING, _HEAD))
    return embedding is None or head is None or _are_equal(embedding, head)


def with_embedding(directory: TensorDirectory, spec: ModelSpec) -> TensorDirectory:
    """Returns `directory`, in which the LM head is also the embedding if `spec` is tied and the files hold the head only."""
    tensors = directory.tensors
    if not spec.tie_embeddings or _EMBEDDING in tensors or _HEAD not in tensors:
        return directory
    return replace(directory, tensors={**tensors, _EMBEDDING: tensors[_HEAD]})


def _are_equal(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether two tensors have the same type, shape and bytes. Those of unlike types count as unequal even if all their values
    are equal: as a head of its own, the second one gives the same results."""
    if (one.dtype, one.shape, len(one.data)) != (other.dtype, other.shape, len(other.data)):
        return False
    return all(
        _read(one.file, one.data[at : at + _RUN_BYTES]) == _read(other.file, other.data[at : at + _RUN_BYTES])
        for at in range(0, len(one.data), _RUN_BYTES)
    )


def _read(file: Path, run: range) -> bytes:
    with file.open("rb") as opened:
        opened.seek(run.start)
        return opened.read(len(run))
