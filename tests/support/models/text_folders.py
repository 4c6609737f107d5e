"""Hugging Face folders without weights, for what the text files of a model decide. Made without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from placement.checkpoint.header import read
from serve_app.deployment.served_model import ServedModel
from serve_app.text import byte_level

BASE_END, TURN_START, TURN_END, START = 256, 257, 258, 259
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>")
"""Tokens 256 to 259; the ids before are bytes."""
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": BASE_END,
}


def write_tokenizer(folder: Path, start: str = "") -> None:
    """A tokenizer of bytes; `start` is what it puts before a text, such as ``<s>``."""
    tokenizer = Tokenizer(models.BPE(dict(byte_level.ALPHABET), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    if start:
        names = start.split()
        special = [(name, BASE_END + SPECIAL.index(name)) for name in names]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=special
        )
    tokenizer.save(str(folder / "tokenizer.json"))


def write_folder(folder: Path, start: str = "", config: Mapping[str, Any] = CONFIG, **tokenizer_config: Any) -> Path:
    """A folder with a config.json, a tokenizer and a tokenizer_config.json of these fields."""
    write_tokenizer(folder, start)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", **tokenizer_config}))
    return folder


def opened(folder: Path) -> ServedModel:
    """The model of a folder as the endpoint has it."""
    return ServedModel.open(name="folder", path=folder, spec=read(folder), max_model_len=512, created=1)
