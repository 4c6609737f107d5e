"""The text files of a model on disk: its tokenizer and chat template, if it has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from placement.checkpoint.directory.text_file import read_text
from placement.checkpoint.gguf.split import holds_gguf, read_model
from placement.model.spec import ModelError
from serve_app.text import gguf_tokenizer
from serve_app.text.named_templates import DEFAULT, folder_templates, gguf_templates
from serve_app.text.template import ChatTemplate
from serve_app.text.tokenizer import Tokenizer, TokenizerError, read_tokenizer_json

_GGUF_PREFIX = "tokenizer.ggml."
_JSON_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.json", "processor_config.json")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TextFiles:
    """The text side of a model. Without a tokenizer it takes and returns token ids only; without a template it cannot chat.

    `template_names` are all templates of the model; `template` is the one named ``default``, if there is one. `eos_token_id` is
    the end token of the tokenizer, which may be another than that of the model's configuration.
    """

    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    template_names: tuple[str, ...] = ()


def read_text_files(path: Path) -> TextFiles:
    """Returns the tokenizer, chat template, start and end token of a Hugging Face folder or a GGUF file, as far as it has them.

    Raises `TokenizerError` if a file cannot be read or its tokenizer is not supported, and `TemplateError` if the template
    cannot be read.
    """
    return _read_folder(path) if path.is_dir() and not holds_gguf(path) else _read_gguf(path)


def _read_folder(folder: Path) -> TextFiles:
    file = folder / "tokenizer.json"
    if not file.exists():
        return TextFiles(None, None)
    tokenizer = read_tokenizer_json(file)
    json_files = {name: _json(folder / name) for name in _JSON_FILES}
    names = _special_tokens(json_files)
    templates = folder_templates(folder, json_files)
    return TextFiles(
        tokenizer,
        _default(templates, names),
        _id(tokenizer, names, "bos_token"),
        _id(tokenizer, names, "eos_token"),
        tuple(sorted(templates)),
    )


def _special_tokens(json_files: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns the special tokens by their name in a template (``bos_token``). As in transformers, special_tokens_map.json
    counts unless tokenizer_config.json lists the added tokens itself."""
    config = json_files["tokenizer_config.json"]
    older = {} if "added_tokens_decoder" in config else json_files["special_tokens_map.json"]
    entries = {**config, **older}
    return {name: text for name in _NAMED_TOKENS if (text := _token_text(entries.get(name))) is not None}


def _default(templates: Mapping[str, str], names: Mapping[str, str]) -> ChatTemplate | None:
    return ChatTemplate(templates[DEFAULT], names) if DEFAULT in templates else None


def _id(tokenizer: Tokenizer, names: Mapping[str, str], name: str) -> int | None:
    return tokenizer.token_id(names[name]) if name in names else None


def _token_text(entry: Any) -> str | None:
    """Returns a token of tokenizer_config.json, which is a text or an object with it as ``content``."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def _json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, which is empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        data = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise TokenizerError(f"{path} must hold a JSON object, but holds a {type(data).__name__}")
    return data


def _read_gguf(path: Path) -> TextFiles:
    try:
        fields = read_model(path, long_arrays=True).fields
    except ModelError as error:
        raise TokenizerError(str(error)) from error
    found = {key.removeprefix(_GGUF_PREFIX): value for key, value in fields.items() if key.startswith(_GGUF_PREFIX)}
    if "model" not in found or found["model"] == "none":
        return TextFiles(None, None)
    tokenizer = gguf_tokenizer.build(found)
    tokens = found["tokens"]
    named = (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding"))
    names = {name: tokens[found[f"{key}_token_id"]] for name, key in named if f"{key}_token_id" in found}
    templates = gguf_templates(path, fields)
    return TextFiles(
        tokenizer,
        _default(templates, names),
        found.get("bos_token_id"),
        found.get("eos_token_id"),
        tuple(sorted(templates)),
    )
