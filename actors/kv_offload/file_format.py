"""The file format of a block part: a header that identifies the part, then its bytes, under one checksum.

    "SWKV" | checksum of all that follows, 16 bytes (BLAKE2b) | header length u32 | header (msgpack) | bytes of the part

A file that does not match exactly is a miss: a flipped bit anywhere, a truncated or extended file, another version, or a file
under another part's name.
"""

from __future__ import annotations

import hashlib
import struct

import msgpack
from pydantic import ValidationError

from actors.kv_offload.block_part import BlockName, BlockPart
from actors.wire.message import Message

VERSION = 1
_MAGIC = b"SWKV"
_SUM_BYTES = 16
_LENGTH = struct.Struct("<I")
_MALFORMED = (ValidationError, ValueError, TypeError, msgpack.UnpackException)


class _Header(Message):
    version: int
    block: str
    piece: str  # the key of the part in files on disk
    num_bytes: int


def encode(block: BlockName, part: BlockPart, data: bytes) -> bytes:
    """Returns the content of the file of a block's part whose values are the bytes `data`: a checksum, a header that names the
    part, and `data`."""
    header = _Header(version=VERSION, block=block, piece=str(part), num_bytes=len(data)).pack()
    body = b"".join((_LENGTH.pack(len(header)), header, data))
    return b"".join((_MAGIC, _checksum(body), body))


def decode(content: bytes, block: BlockName, part: BlockPart) -> bytes | None:
    """Returns the values of this part of this block from the content of its file (the inverse of `encode`), or None if the file
    is damaged, of another version, or belongs to another part."""
    start = len(_MAGIC) + _SUM_BYTES
    body = content[start:]
    if len(body) < _LENGTH.size or content[:start] != _MAGIC + _checksum(body):
        return None
    end = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    try:
        header = _Header.unpack(body[_LENGTH.size : end])
    except _MALFORMED:
        return None
    data = body[end:]
    meant = _Header(version=VERSION, block=block, piece=str(part), num_bytes=len(data))
    return data if header == meant else None


def file_bytes(block: BlockName, part: BlockPart, num_bytes: int) -> int:
    """Returns the size in bytes of the file that `encode` makes for a part whose values have `num_bytes` bytes."""
    header = _Header(version=VERSION, block=block, piece=str(part), num_bytes=num_bytes).pack()
    return len(_MAGIC) + _SUM_BYTES + _LENGTH.size + len(header) + num_bytes


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_SUM_BYTES).digest()
