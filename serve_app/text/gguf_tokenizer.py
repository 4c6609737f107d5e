"""The tokenizer inside a GGUF file (keys ``tokenizer.ggml.*``), rebuilt with the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from serve_app.text.pretokenizers import COMPOSED, PRETOKENIZERS, STARTS_WITH_BOS, WHOLE_WORDS_FIRST
from serve_app.text.token_bytes import TokenizerError
from serve_app.text.tokenizer import Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Values of ``tokenizer.ggml.token_type``."""
_SPACE = "\u2581"

Metadata = Mapping[str, Any]
"""Plain Python values by GGUF key, without the prefix ``tokenizer.ggml.``."""


def build(metadata: Metadata) -> Tokenizer:
    """Returns the tokenizer that `metadata` (the GGUF keys ``tokenizer.ggml.*`` without the prefix) describes.

    Raises `TokenizerError` for a tokenizer model other than gpt2 and llama, or a pre-tokenizer that is not supported, and
    `KeyError` if a key that it needs is missing.
    """
    kind = metadata.get("model")
    if kind == "gpt2":
        inner = _byte_level(metadata)
    elif kind == "llama":
        inner = _sentencepiece(metadata)
    else:
        raise TokenizerError(f"tokenizer.ggml.model {kind!r} is not supported: gpt2 and llama are")
    _add_tokens(inner, metadata)
    _frame(inner, metadata, by_default=kind == "llama" or metadata.get("pre") in STARTS_WITH_BOS)
    return Tokenizer(inner)


def _byte_level(metadata: Metadata) -> tokenizers.Tokenizer:
    rule = metadata.get("pre", "default")
    if rule not in PRETOKENIZERS:
        raise TokenizerError(f"tokenizer.ggml.pre {rule!r} is not supported: {', '.join(PRETOKENIZERS)} are")
    vocabulary = _vocabulary(metadata)
    merges = [_pair(merge) for merge in metadata["merges"]]
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rule in WHOLE_WORDS_FIRST))
    if rule in COMPOSED:
        inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = PRETOKENIZERS[rule]()
    inner.decoder = decoders.ByteLevel()
    return inner


def _sentencepiece(metadata: Metadata) -> tokenizers.Tokenizer:
    """Returns a SentencePiece BPE tokenizer: the pair whose joined piece has the best score is merged first; unknown characters
    become bytes."""
    vocabulary = _vocabulary(metadata)
    merges = [_pair(merge) for merge in metadata["merges"]] if "merges" in metadata else _merges(metadata, vocabulary)
    unknown = metadata["tokens"][metadata.get("unknown_token_id", 0)]
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = metadata.get("add_space_prefix", True)
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    inner.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE)] * prefix + spaces)
    parts: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence(parts + [decoders.Strip(" ", 1, 0)] * prefix)
    return inner


def _merges(metadata: Metadata, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Returns all ways to join two pieces to a third, best score of the third first (ties: lower ids of the parts first)."""
    found: list[tuple[float, int, int, str, str]] = []
    for piece, score in zip(metadata["tokens"], metadata["scores"], strict=True):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-score, vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _vocabulary(metadata: Metadata) -> dict[str, int]:
    return {token: index for index, token in enumerate(metadata["tokens"])}


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _add_tokens(inner: tokenizers.Tokenizer, metadata: Metadata) -> None:
    """Add the tokens that are recognised literally in a text. Control tokens are also left out when decoding."""
    kinds: Sequence[int] = metadata.get("token_type", [])
    for token, kind in zip(metadata["tokens"], kinds, strict=False):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            special = kind != _USER_DEFINED
            added = AddedToken(token, normalized=False, special=special)
            (inner.add_special_tokens if special else inner.add_tokens)([added])


def _frame(inner: tokenizers.Tokenizer, metadata: Metadata, by_default: bool) -> None:
    """Put a start and an end token around a text, if the file requests them."""
    bos, eos = (metadata.get(f"{name}_token_id") if metadata.get(f"add_{name}_token", default) else None
                for name, default in (("bos", by_default), ("eos", False)))  # fmt: skip
    names = metadata["tokens"]
    around = [(names[index], index) for index in (bos, eos) if index is not None]
    if not around:
        return
    start = [names[bos]] if bos is not None else []
    end = [names[eos]] if eos is not None else []
    inner.post_processor = processors.TemplateProcessing(
        single=[*start, "$A", *end], pair=[*start, "$A", *end, *start, "$B", *end], special_tokens=around
    )
