"""The properties of the served model that the endpoint needs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from placement.model.spec import ModelSpec
from serve_app.text.model_files import read_text_files
from serve_app.text.template import ChatTemplate
from serve_app.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """One model, served under one or more names; answers carry the first one.

    `max_model_len` limits prompt and generated tokens together. Without `tokenizer`, prompts and answers are token ids; without
    `template`, there is no chat; `template_names` are then the templates that the model has besides. `bos_token_id` starts an
    empty prompt. `eos_token_ids` are all tokens that end an answer: those of the configuration and that of the tokenizer.
    """

    names: tuple[str, ...]
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None
    template_names: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        """The name that answers carry: the first of `names`."""
        return self.names[0]

    @classmethod
    def open(
        cls,
        *,
        name: str,
        path: Path,
        spec: ModelSpec,
        max_model_len: int,
        created: int | None = None,
        aliases: Sequence[str] = (),
    ) -> Self:
        """Returns the model at `path` (a Hugging Face folder or a GGUF file) with its tokenizer and template, if it has them.

        `name` and `aliases` are the names that clients may use, `max_model_len` is the limit of prompt and generated tokens
        together, and `created` is in seconds since 1970 (None: now). Raises `serve_app.text.tokenizer.TokenizerError` or
        `serve_app.text.template.TemplateError` if the text files cannot be used.
        """
        text = read_text_files(path)
        ends = spec.eos_token_ids if text.eos_token_id is None else (*spec.eos_token_ids, text.eos_token_id)
        return cls(
            names=(name, *aliases),
            vocab_size=spec.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=tuple(dict.fromkeys(ends)),
            bos_token_id=spec.bos_token_id if spec.bos_token_id is not None else text.bos_token_id,
            tokenizer=text.tokenizer,
            template=text.template,
            template_names=text.template_names,
            created=int(time.time()) if created is None else created,
        )
