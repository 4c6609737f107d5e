"""Hashes one rank's share of the checkpoint while the rank loads its weights.

    thread of the rank     fill parameter 0 │ fill parameter 1 │ fill parameter 2 │ ...
    threads of the hasher                     hash its tensors │ hash its tensors │ ...      still in the page cache

Which tensors belong to the share is decided in `placement.ownership.hash_shares`; `placement.model.digest` makes the model
digest of what all ranks have hashed.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from actors.model.checkpoint.hash_cache import FileIdentity, FileRun, HashCache
from placement.checkpoint.directory.tensor_directory import TensorEntry
from placement.checkpoint.header import read_tensors
from placement.layout.layout import Layout
from placement.model.digest import CHUNK_BYTES, chunk_digest, model_digest
from placement.model.spec import ModelError, ModelSpec
from placement.ownership.hash_shares import hash_shares
from placement.ownership.weight_slices import Parameter

_READ_BYTES = 1 << 20
_MOST_THREADS = 8


class WeightHasher:
    """Hashes the chunks of tensors that a rank is responsible for. A context manager: leaving it ends its threads.

    Created before the rank opens the checkpoint, so that a file which is replaced or changed meanwhile is noticed.
    """

    def __init__(self, path: Path, spec: ModelSpec, layout: Layout, world_rank: int, threads: int, cache: HashCache) -> None:
        """Open the files of the checkpoint at `path`. `threads` is the number of CPU threads to use, at most 8 of them.

        Raises `ModelError`, which names the file, if the checkpoint is damaged or lacks a tensor of the rank.
        """
        self._tensors = read_tensors(path, spec).tensors
        try:
            sizes = {name: len(entry.data) for name, entry in self._tensors.items()}
            self._waiting = hash_shares(spec, layout, sizes)[world_rank]
        except KeyError as error:
            raise ModelError(f"{path}: tensor {error.args[0]} is missing") from error
        self._cache = cache
        self._open = ExitStack()
        self._files = {file: self._opened(file) for file in {self._tensors[name].file for name in self._waiting}}
        self._threads = ThreadPoolExecutor(min(max(threads, 1), _MOST_THREADS), thread_name_prefix="weight-hasher")
        self._hashes: list[tuple[str, int, Future[bytes]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._open.close()

    def add(self, parameter: Parameter) -> None:
        """Begin to hash this rank's chunks of the tensors that `parameter` was filled from. Does not wait."""
        for weight_slice in parameter.slices:
            self._begin(weight_slice.source)

    def finish(self) -> bytes:
        """Wait until the whole share is hashed. Returns the chunk digests one after the other, 32 bytes each.

        Raises `ModelError` if a file was changed, replaced or removed since the hasher was created, or cannot be read.
        """
        for name in list(self._waiting):
            self._begin(name)
        found = []
        for name, chunk, future in self._hashes:
            entry = self._tensors[name]
            found.append(chunk_digest(name, entry.dtype, entry.shape, chunk, future.result()))
        for file in self._files.values():
            file.finish(self._cache)
        return b"".join(found)

    def _begin(self, name: str) -> None:
        entry = self._tensors[name]
        for chunk in self._waiting.pop(name, []):
            self._hashes.append((name, chunk, self._threads.submit(self._files[entry.file].hash, _run(entry, chunk))))

    def _opened(self, path: Path) -> _WeightFile:
        file = _WeightFile(path, self._cache)
        self._open.callback(file.close)
        return file


class NoWeightHasher:
    """The hasher of a rank whose replica needs no model digest."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Does nothing."""

    def add(self, parameter: Parameter) -> None:
        """See `WeightHasher.add`. Does nothing."""

    def finish(self) -> bytes:
        """See `WeightHasher.finish`. Returns no digests."""
        return b""


def whole_digest(path: Path, spec: ModelSpec, cache: HashCache) -> str:
    """Returns the model digest of the checkpoint at `path`, 64 hexadecimal digits, computed by this process alone.

    `spec` is the model in the checkpoint. Raises `ModelError` if the checkpoint is damaged or incomplete.
    """
    with WeightHasher(path, spec, Layout(), 0, len(os.sched_getaffinity(0)), cache) as hasher:
        return model_digest(spec, [hasher.finish()])


def _run(entry: TensorEntry, chunk: int) -> FileRun:
    run = entry.data[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
    return run.start, run.stop


class _WeightFile:
    """One open file of weights, with the hashes of its runs of bytes that are in the cache. `hash` is thread-safe."""

    def __init__(self, path: Path, cache: HashCache) -> None:
        self._path = path
        try:
            self._handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error})") from error
        self._identity = FileIdentity.of(os.fstat(self._handle))
        self._is_kept, self._known = cache.keeps(self._identity), cache.known(self._identity)
        self._fresh: dict[FileRun, bytes] = {}

    def hash(self, run: FileRun) -> bytes:
        """Returns the SHA-256 of a run of bytes, from the cache or from the file."""
        if run not in self._known:
            self._fresh[run] = self._hash(*run)
        return self._known.get(run) or self._fresh[run]

    def finish(self, cache: HashCache) -> None:
        """Add what was hashed to the cache, after a check that the file is still what it was."""
        try:
            is_same = FileIdentity.of(self._path.stat()) == self._identity
        except OSError:
            is_same = False
        if not is_same:
            raise ModelError(f"{self._path} was changed while it was loaded: start again when it is complete")
        if self._is_kept:
            cache.add(self._identity, self._fresh)

    def close(self) -> None:
        os.close(self._handle)

    def _hash(self, begin: int, end: int) -> bytes:
        digest, buffer = hashlib.sha256(), memoryview(bytearray(min(_READ_BYTES, end - begin)))
        while begin < end:
            try:
                count = os.preadv(self._handle, [buffer[: end - begin]], begin)
            except OSError as error:
                raise ModelError(f"{self._path}: cannot be read ({error})") from error
            if not count:
                raise ModelError(f"{self._path} was shortened while it was loaded")
            digest.update(buffer[:count])
            begin += count
        return digest.digest()
