"""The model digest: a hash over a model's specification and over every byte of every tensor that it uses.

Two servers may exchange KV pages, or reuse each other's pages on disk, only if the same tokens have the same KV in both. That
is so if they run the same specification (sizes, rope, scales) with the same weights, in the same dtype, which is compared
beside the digest.

    tensor    | chunk 0 | chunk 1 | ... |      chunks of `CHUNK_BYTES`, as they are in the file
                   │         │
              chunk digest  chunk digest       SHA-256 of the tensor's name, type and shape, the chunk's number and its bytes
                   └────┬────┘
    sorted, with those of all tensors and the specification: SHA-256

The order of chunk digests does not matter, so each rank computes some of them while it loads
(`placement.ownership.hash_shares`), and the digest is the same under any layout and however the tensors are distributed over
files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from placement.model.spec import ModelSpec

CHUNK_BYTES = 64 << 20
"""Size of a chunk of a tensor; the last one of a tensor may be shorter."""
_DIGEST_BYTES = 32
_FORM = b"shardwright/model/2\0"


def num_chunks(num_bytes: int) -> int:
    """Returns the number of chunks of a tensor of `num_bytes` bytes, at least 1."""
    return max(1, -(-num_bytes // CHUNK_BYTES))


def chunk_digest(name: str, dtype: str, shape: tuple[int, ...], chunk: int, content: bytes) -> bytes:
    """Returns the digest of a chunk of a tensor, 32 bytes.

    `name` is the tensor's Hugging Face name, `dtype` its type as the file has it, `chunk` the chunk's number in the tensor, and
    `content` the SHA-256 of its bytes.
    """
    return hashlib.sha256(b"\0".join((name.encode(), dtype.encode(), repr((shape, chunk)).encode(), content))).digest()


def model_digest(spec: ModelSpec, shares: Iterable[bytes]) -> str:
    """Returns the digest of a model, 64 hexadecimal digits, from its specification and the digests of all chunks of all its
    tensors.

    `shares` are the chunk digests of each rank, one after the other. Neither their order nor that of the shares matters.
    """
    digest = hashlib.sha256(_FORM + spec.model_dump_json().encode() + b"\0")
    digest.update(b"".join(sorted(each for share in shares for each in _split(share))))
    return digest.hexdigest()


def _split(share: bytes) -> Iterator[bytes]:
    return (share[at : at + _DIGEST_BYTES] for at in range(0, len(share), _DIGEST_BYTES))
