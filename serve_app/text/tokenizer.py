"""Tokenizers: text to token ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import tokenizers

from placement.checkpoint.directory.text_file import read_text
from serve_app.text.token_bytes import TokenizerError, token_bytes

__all__ = ["Tokenizer", "TokenizerError", "read_tokenizer_json"]


class Tokenizer:
    """A `tokenizers.Tokenizer` that also has its tokens as bytes."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._bytes = token_bytes(inner)
        self._start = _start(inner)
        self.special_ids = frozenset(index for index, token in inner.get_added_tokens_decoder().items() if token.special)

    def __len__(self) -> int:
        """Returns one more than the largest token id."""
        return len(self._bytes.table)

    def to_json(self) -> str:
        """Returns the content of a ``tokenizer.json`` (JSON text of the `tokenizers` library) for this tokenizer."""
        return str(self._inner.to_str())

    def __getstate__(self) -> str:
        return self.to_json()

    def __setstate__(self, state: str) -> None:
        self.__init__(tokenizers.Tokenizer.from_str(state))  # type: ignore[misc]

    @property
    def drops_first_space(self) -> bool:
        """Whether decoding a whole text drops its first space, which `encode` added."""
        return self._bytes.drops_first_space

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`. Special tokens that are written in the text are recognised.

        `add_special_tokens`: whether to add the tokens that the model needs around a text (usually a start token). A text that
        begins with the start token, as a rendered chat template does, gets no second one.
        """
        ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        size = len(self._start)
        is_doubled = add_special_tokens and size > 0 and ids[:size] == ids[size : 2 * size] == self._start
        return ids[size:] if is_doubled else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of a whole sequence of token ids, by default without special tokens. Bytes that are not UTF-8 become
        U+FFFD, one for each maximal invalid part. Ids beyond the vocabulary have no text."""
        kept = [index for index in ids if not (skip_special_tokens and index in self.special_ids)]
        text = b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.drops_first_space else text

    def token_bytes(self, index: int) -> bytes:
        """Returns the bytes of the token with the id `index`; empty for an id beyond the vocabulary (padding rows of the
        embedding)."""
        return self._bytes.table[index] if index < len(self._bytes.table) else b""

    def token_id(self, token: str) -> int | None:
        """Returns the id of the vocabulary entry `token`, in the vocabulary's own writing, or None if there is none."""
        index: int | None = self._inner.token_to_id(token)
        return index

    def token_label(self, index: int) -> str:
        """Returns the token with the id `index` as readable text; a part of a character is shown as ``bytes:\\xf0\\x9f``."""
        data = self.token_bytes(index)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _start(inner: tokenizers.Tokenizer) -> list[int]:
    """Returns the ids of the tokens that `inner` adds at the front of a text."""
    probe = inner.encode("a")
    return [index for index, _ in takewhile(lambda pair: pair[1], zip(probe.ids, probe.special_tokens_mask, strict=True))]


def read_tokenizer_json(path: Path) -> Tokenizer:
    """Returns the tokenizer of the Hugging Face file ``tokenizer.json`` at `path`.

    Raises `TokenizerError` if it cannot be read as such, or if its decoder is not supported.
    """
    try:
        inner = tokenizers.Tokenizer.from_str(read_text(path))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{path} is not a tokenizer file: {error}") from error
    return Tokenizer(inner)
