"""The chat templates of a model by name, from all files in which they are published.

The template of a chat is the one named ``default``; a template without a name has this one. Where two files have a template of
the same name, the file that is further to the left counts::

    chat_template.jinja   additional_chat_templates/   chat_template.json   tokenizer_config.json   processor_config.json
    (default)             NAME.jinja
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from placement.checkpoint.directory.text_file import read_text
from serve_app.text.token_bytes import TokenizerError

DEFAULT = "default"
"""Name of the template that chats use."""

_JSON_FILES = ("processor_config.json", "tokenizer_config.json", "chat_template.json")
_GGUF_KEY = "tokenizer.chat_template"


def folder_templates(folder: Path, json_files: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns the sources of the chat templates of a Hugging Face folder by name. `json_files` are the contents of its JSON
    files by file name.

    Raises `TokenizerError`, which names the file, if an entry is not a template or a file cannot be read.
    """
    templates: dict[str, str] = {}
    for name in _JSON_FILES:
        templates |= _named(json_files.get(name, {}).get("chat_template"), folder / name)
    templates |= {file.stem: _read(file) for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    file = folder / "chat_template.jinja"
    return templates | ({DEFAULT: _read(file)} if file.exists() else {})


def gguf_templates(file: Path, fields: Mapping[str, Any]) -> dict[str, str]:
    """Returns the sources of the chat templates of the GGUF `file` by name, from the `fields` of its header:
    ``tokenizer.chat_template``, and ``tokenizer.chat_template.NAME`` for each further one.

    Raises `TokenizerError`, which names the file, if one of them is not a text.
    """
    named = {key.removeprefix(f"{_GGUF_KEY}."): value for key, value in fields.items() if key.startswith(f"{_GGUF_KEY}.")}
    return _named(named | ({DEFAULT: fields[_GGUF_KEY]} if _GGUF_KEY in fields else {}), file)


def _named(entry: Any, file: Path) -> dict[str, str]:
    """Returns the templates of the entry ``chat_template``: a text, a list of objects with name and template, or an object."""
    if entry is None:
        return {}
    if isinstance(entry, list) and all(isinstance(each, dict) for each in entry):
        entry = {each.get("name"): each.get("template") for each in entry}
    named = entry if isinstance(entry, dict) else {DEFAULT: entry}
    if not all(isinstance(name, str) and isinstance(source, str) for name, source in named.items()):
        raise TokenizerError(f"{file}: chat_template must be a text, or a list of objects with a name and a template")
    return named


def _read(file: Path) -> str:
    try:
        return read_text(file)
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{file} cannot be read as text: {error}") from error
