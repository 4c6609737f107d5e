"""Pre-tokenizers of byte-level BPE: the rules that split a text into words before merging, by their GGUF names.

The patterns are facts about each model: they are those of the tokenizer the model was trained with.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _gpt2_single_digits() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), _gpt2()])


def _words(numbers: str) -> Callable[[], PreTokenizer]:
    """Returns the rule of tiktoken's cl100k family. `numbers` is the pattern of the digits that stay together."""
    pattern = "|".join((_CONTRACTIONS, _WORDS, numbers, _REST))
    return lambda: Sequence([Split(Regex(pattern), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])


_THREE_DIGITS = _words(r"\p{N}{1,3}")
_ONE_DIGIT = _words(r"\p{N}")

PRETOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _gpt2_single_digits,
    "starcoder": _gpt2_single_digits,
    "llama-bpe": _THREE_DIGITS,
    "llama3": _THREE_DIGITS,
    "smaug-bpe": _THREE_DIGITS,
    "dbrx": _THREE_DIGITS,
    "chatglm-bpe": _THREE_DIGITS,
    "glm4": _THREE_DIGITS,
    "qwen2": _ONE_DIGIT,
    "deepseek-r1-qwen": _ONE_DIGIT,
    "stablelm2": _ONE_DIGIT,
}
"""The rules by the value of ``tokenizer.ggml.pre``."""

WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3"})
"""Rules that take a word which is a vocabulary entry as a whole, regardless of the merges."""

COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen"})
"""Rules that first normalise text to Unicode form NFC."""

STARTS_WITH_BOS = frozenset({"llama-bpe", "llama3"})
"""Rules whose models need a start token unless the file decides otherwise."""
