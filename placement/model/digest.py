"""The model digest: a hash over a model's specification and a sample of its weights.

Two servers may exchange KV pages, or reuse each other's pages on disk, only if they run the same weights. Hashing gigabytes
would delay every start, so the digest covers the length of each weight file, its header, and `SAMPLES` samples spread evenly
over it. Two trainings of one architecture differ everywhere, and a truncated or replaced file differs too. A deliberate edit
of a few bytes may go unnoticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from placement.model.spec import ModelSpec

SAMPLES = 64
_SAMPLE_BYTES = 4096
_FORM = b"shardwright/model/1\0"


def model_digest(spec: ModelSpec, path: Path) -> str:
    """Returns the digest, 64 hexadecimal digits, of a specification and of a folder of safetensors files or a GGUF file at
    `path`.

    It covers the length and a sample of the bytes of every weight file, so a few edited bytes may go unnoticed. Raises
    `FileNotFoundError` if there are no weight files, and `OSError` if one cannot be read.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise FileNotFoundError(f"{path}: there are no weights (*.safetensors, or a GGUF file) to name the model by")
    digest = hashlib.sha256(_FORM + spec.model_dump_json().encode())
    for file in files:
        digest.update(file.stat().st_size.to_bytes(8, "little"))
        for sample in _samples(file):
            digest.update(sample)
    return digest.hexdigest()


def _samples(file: Path) -> Iterator[bytes]:
    """Yields the first `SAMPLES` samples of a file, which cover its header, then samples spread evenly up to its end."""
    size = file.stat().st_size
    step = max(_SAMPLE_BYTES, (size - _SAMPLE_BYTES) // SAMPLES)
    with file.open("rb") as opened:
        yield opened.read(_SAMPLE_BYTES * SAMPLES)
        for at in range(step, size, step):
            opened.seek(at)
            yield opened.read(_SAMPLE_BYTES)
