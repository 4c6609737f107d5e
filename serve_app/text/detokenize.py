"""Token ids to text, one token at a time, without ever showing half a character.

tokens      f0 9f | 98 80 | 20 68 69          (an emoji cut in two, then " hi")
push gives    ""     "😀"     " hi"
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from serve_app.text.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4
"""Bytes of the longest UTF-8 character: no more tokens than this can hold an unfinished one."""


class Detokenizer:
    """Joined over a sequence, `push` and `finish` give exactly `Tokenizer.decode` of the sequence.

    The text continues the prompt: a first space is kept, and a character the prompt left unfinished is completed.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in prompt[-_LONGEST_CHARACTER:]:
            self.push(token)

    def push(self, token: int) -> str:
        """The characters that this token completes."""
        if token in self._skipped:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What is left when the sequence ends inside a character: U+FFFD, as `Tokenizer.decode` writes it."""
        return self._decoder.decode(b"", final=True)
