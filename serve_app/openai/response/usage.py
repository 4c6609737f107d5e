"""Token usage of an answer. A prompt is counted once, however many choices continue it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve_app.openai.request.plan import ChoiceRequest
from serve_app.openai.response.delta import Delta


class Usage:
    """Counts the tokens of the deltas as they arrive."""

    def __init__(self, choices: Sequence[ChoiceRequest]) -> None:
        self._firsts = {choice.index for choice in choices if choice.first}
        self._cached: dict[int, int] = {}
        self.prompt_tokens = sum(len(choice.prompt.ids) for choice in choices if choice.first)
        self.completion_tokens = 0

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens found in the prefix cache so far, by the first choice of each prompt."""
        return sum(self._cached.values())

    def add(self, delta: Delta) -> None:
        """Count the generated tokens of a delta, and the prompt tokens that were found in the prefix cache."""
        self.completion_tokens += delta.generated
        if delta.index in self._firsts:
            self._cached[delta.index] = max(delta.cached_tokens, self._cached.get(delta.index, 0))

    def body(self) -> dict[str, Any]:
        """Returns the ``usage`` object in OpenAI's form, with the numbers of tokens counted so far."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
