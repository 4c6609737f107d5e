"""A name for a model by what it computes: its sizes, and a sample of its weights.

Two servers may exchange KV pages, or find each other's on a disk, only if they run the same weights. Reading gigabytes to
know would delay every start, so of each weight file the header and `SAMPLES` samples spread evenly over it count, and its
length: two trainings of one architecture differ everywhere, and a file that was cut or replaced differs too. A file edited
in a few bytes on purpose may not.
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
    """64 hexadecimal digits for the model in a folder of safetensors files, or in a GGUF file.

    Raises `FileNotFoundError` where there are no weights.
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
    """Its first samples, where a header is, then samples spread evenly up to its end."""
    size = file.stat().st_size
    step = max(_SAMPLE_BYTES, (size - _SAMPLE_BYTES) // SAMPLES)
    with file.open("rb") as opened:
        yield opened.read(_SAMPLE_BYTES * SAMPLES)
        for at in range(step, size, step):
            opened.seek(at)
            yield opened.read(_SAMPLE_BYTES)
