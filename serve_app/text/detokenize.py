"""Incremental detokenizing: token ids to text, one token at a time, never with an incomplete character.

tokens      f0 9f | 98 80 | 20 68 69          (an emoji split over two tokens, then " hi")
push gives    ""     "😀"     " hi"
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from serve_app.text.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4
"""Bytes of the longest UTF-8 character, which is also the maximum number of tokens with an unfinished one."""


class Detokenizer:
    """Turns tokens into text. Joined over a sequence, `push` and `finish` give exactly `Tokenizer.decode` of the sequence.

    The text continues the prompt: a first space is kept, and a character that the prompt left unfinished is completed.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in prompt[-_LONGEST_CHARACTER:]:
            self.push(token)

    def push(self, token: int) -> str:
        """Returns the characters that `token` (an id) completes; empty if it is a skipped special token or ends inside a
        character. Invalid UTF-8 becomes U+FFFD."""
        if token in self._skipped:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """Returns the rest at the end of the sequence: U+FFFD if it ends inside a character, as `Tokenizer.decode` writes it,
        else an empty text."""
        return self._decoder.decode(b"", final=True)
