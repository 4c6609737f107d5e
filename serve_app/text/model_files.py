"""The text files of a model on disk: its tokenizer and chat template, if it has them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from placement.checkpoint.gguf.gguf_file import read_header
from placement.model.spec import ModelError
from serve_app.text import gguf_tokenizer
from serve_app.text.template import ChatTemplate
from serve_app.text.tokenizer import Tokenizer, TokenizerError, read_tokenizer_json

_GGUF_PREFIX = "tokenizer.ggml."
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TextFiles:
    """The text side of a model. Without a tokenizer it takes and returns token ids only; without a template it cannot chat."""

    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    bos_token_id: int | None = None


def read_text_files(path: Path) -> TextFiles:
    """Returns the tokenizer, chat template and start token of a Hugging Face folder or a GGUF file, as far as it has them.

    Raises `TokenizerError` if a file cannot be read or its tokenizer is not supported, and `TemplateError` if the template
    cannot be read.
    """
    return _read_folder(path) if path.is_dir() else _read_gguf(path)


def _read_folder(folder: Path) -> TextFiles:
    file = folder / "tokenizer.json"
    if not file.exists():
        return TextFiles(None, None)
    tokenizer = read_tokenizer_json(file)
    config = _json(folder / "tokenizer_config.json")
    names = {name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name))) is not None}
    source = _template_source(folder, config)
    bos = tokenizer.token_id(names["bos_token"]) if "bos_token" in names else None
    return TextFiles(tokenizer, None if source is None else ChatTemplate(source, names), bos)


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    """Returns the chat template: ``chat_template.jinja``, or else the entry of tokenizer_config.json, a text or a list of named
    ones."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        if "default" not in named:
            raise TokenizerError(f"{folder}: tokenizer_config.json names the chat templates {sorted(named)}, none is 'default'")
        source = named["default"]
    return source


def _token_text(entry: Any) -> str | None:
    """Returns a token of tokenizer_config.json, which is a text or an object with it as ``content``."""
    return entry.get("content") if isinstance(entry, dict) else entry


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    return data


def _read_gguf(path: Path) -> TextFiles:
    try:
        fields = read_header(path, long_arrays=True).fields
    except ModelError as error:
        raise TokenizerError(str(error)) from error
    found = {key.removeprefix(_GGUF_PREFIX): value for key, value in fields.items() if key.startswith(_GGUF_PREFIX)}
    if "model" not in found or found["model"] == "none":
        return TextFiles(None, None)
    tokenizer = gguf_tokenizer.build(found)
    tokens = found["tokens"]
    named = (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding"))
    names = {name: tokens[found[f"{key}_token_id"]] for name, key in named if f"{key}_token_id" in found}
    template = fields.get("tokenizer.chat_template")
    return TextFiles(
        tokenizer,
        None if template is None else ChatTemplate(template, names),
        found.get("bos_token_id"),
    )
