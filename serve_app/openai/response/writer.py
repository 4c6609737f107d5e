"""Turns the token events of one choice into deltas of text: detokenised, searched for stop strings, with an echo if requested.

Rules:

- Without a tokenizer there is no text; the token ids are the answer.
- The token that ended the request is not shown as text, unless `include_stop` is set; it is counted.
- A stop string is searched for in the text of the tokens after the first `min_tokens`; it must lie wholly in that text.
- Tokens after the one that completed a stop string are neither shown nor counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from actors.wire.requests import TokenEvent, TokenLogprob
from serve_app.openai.response.delta import Delta, TokenEntry
from serve_app.text.detokenize import Detokenizer
from serve_app.text.stop_strings import StopStrings
from serve_app.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Writing:
    """The options for writing a choice. `ends`: the model's own end tokens, which are not reported as `stop_reason`."""

    tokenizer: Tokenizer | None
    ends: tuple[int, ...] = ()
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    echo: bool = False


class Writer:
    """The state of one choice between events."""

    def __init__(self, index: int, writing: Writing, prompt: Sequence[int], prompt_text: str | None = None) -> None:
        self._index = index
        self._writing = writing
        self._prompt = prompt
        self._prompt_text = prompt_text
        self._text = _Text(writing, prompt)
        self._stops = StopStrings(writing.stops, writing.include_stop)
        self._echoed = not writing.echo
        self._generated = 0

    def write(self, event: TokenEvent) -> Delta:
        """Returns the delta of the choice's next `event`: its text as far as it can be shown, and its tokens. A delta with
        `finish` is the last one, even if more events arrive; it is also set when a stop string is complete."""
        delta = Delta(self._index, prompt_logprobs=event.prompt_logprobs, cached_tokens=event.cached_tokens)
        if not self._echoed and (event.tokens or event.finish or event.prompt_logprobs):
            self._echo(delta, event.prompt_logprobs)
        for token, logprob in zip_longest(event.tokens, event.logprobs[: len(event.tokens)]):
            ends = event.finish == "stop" and delta.generated == len(event.tokens) - 1 and token == event.stop_token
            self._token(delta, token, logprob, hidden=ends and not self._writing.include_stop)
            if delta.finish:
                return delta
        if event.finish in ("stop", "length"):
            self._end(delta, event)
        return delta

    def _token(self, delta: Delta, token: int, logprob: TokenLogprob | None, hidden: bool) -> None:
        delta.entries.append(TokenEntry(token, self._text.length, logprob))
        delta.generated += 1
        self._generated += 1
        if not hidden:
            self._show(delta, self._text.push(token))

    def _show(self, delta: Delta, text: str) -> None:
        if self._generated <= self._writing.min_tokens:
            delta.text += text
            return
        released = self._stops.push(text)
        delta.text += released.text
        if released.stop is not None:
            delta.finish, delta.stop_reason = "stop", released.stop

    def _end(self, delta: Delta, event: TokenEvent) -> None:
        self._show(delta, self._text.finish())
        if delta.finish:
            return
        delta.text += self._stops.finish()
        delta.finish = "stop" if event.finish == "stop" else "length"
        if event.stop_token is not None and event.stop_token not in self._writing.ends:
            delta.stop_reason = event.stop_token

    def _echo(self, delta: Delta, logprobs: Sequence[TokenLogprob | None] | None) -> None:
        """Begin with the prompt: its text as the caller wrote it, or the decoded text of its ids."""
        self._echoed = True
        whole = _Text(self._writing, ())
        starts, pieces = [], []
        for token in self._prompt:
            starts.append(whole.length)
            pieces.append(whole.push(token))
        text = "".join(pieces)
        shift = int(text.startswith(" ") and self._writing.tokenizer is not None and self._writing.tokenizer.drops_first_space)
        delta.text = text[shift:] if self._prompt_text is None else self._prompt_text
        self._text.length = len(delta.text)
        for token, start, logprob in zip_longest(self._prompt, starts, logprobs or ()):
            delta.entries.append(TokenEntry(token, min(max(0, start - shift), len(delta.text)), logprob))


class _Text:
    """A detokenizer that counts the characters. Without a tokenizer, all text is empty."""

    def __init__(self, writing: Writing, prompt: Sequence[int]) -> None:
        tokenizer = writing.tokenizer
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, prompt, writing.skip_special_tokens)
        self.length = 0

    def push(self, token: int) -> str:
        """Returns the characters that `token` (an id) completes, and adds their number to `length`."""
        text = "" if self._detokenizer is None else self._detokenizer.push(token)
        self.length += len(text)
        return text

    def finish(self) -> str:
        """Returns the rest of the text at the end of the sequence; see `Detokenizer.finish`. It is not added to `length`."""
        return "" if self._detokenizer is None else self._detokenizer.finish()
