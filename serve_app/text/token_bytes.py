"""The bytes of each token, read from a tokenizer's own decoder.

With tokens as bytes, a text is the UTF-8 decoding of the joined bytes, however the tokens split it, and the cost of a stream is
linear in its tokens.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import tokenizers

from placement.model.errors import ReportedError
from serve_app.text import byte_level

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
"""The character that SentencePiece writes for a space."""


class TokenizerError(ReportedError, ValueError):
    """A tokenizer that cannot be used. The message names the file or field, its content, and the supported ones."""

    code = "bad_tokenizer"


@dataclass(frozen=True)
class TokenBytes:
    """Token bytes in `table`, indexed by token id. `drops_first_space`: whether the tokenizer itself adds the first space of a
    text."""

    table: list[bytes]
    drops_first_space: bool


def token_bytes(inner: tokenizers.Tokenizer) -> TokenBytes:
    """Returns the bytes of every token of `inner`, a tokenizer of the `tokenizers` library.

    Raises `TokenizerError` if its decoder is neither byte-level nor of SentencePiece's kind.
    """
    decoders = _flat(json.loads(inner.to_str())["decoder"])
    kinds = [decoder["type"] for decoder in decoders]
    added = inner.get_added_tokens_decoder()
    vocabulary = inner.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    if "ByteLevel" in kinds:
        read = byte_level.to_bytes
    elif {"Metaspace", "Replace"} & set(kinds) and set(kinds) <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        read = _sentencepiece_fallback if "ByteFallback" in kinds else _sentencepiece
    else:
        raise TokenizerError(f"tokenizer decoder {kinds or None} is not supported: ByteLevel and SentencePiece ones are")
    for token, index in vocabulary.items():
        table[index] = token.encode() if index in added else read(token)
    return TokenBytes(table, any(_drops_first_space(decoder) for decoder in decoders))


def _sentencepiece(token: str) -> bytes:
    return token.replace(_SPACE, " ").encode()


def _sentencepiece_fallback(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else _sentencepiece(token)


def _drops_first_space(decoder: dict[str, Any]) -> bool:
    if decoder["type"] == "Strip":
        return bool(decoder["content"] == " " and decoder["start"] >= 1)
    return bool(decoder["type"] == "Metaspace" and decoder.get("prepend_scheme", "always") != "never")


def _flat(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Returns the decoders of a (nested) sequence, in order."""
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [inner for part in decoder["decoders"] for inner in _flat(part)]
