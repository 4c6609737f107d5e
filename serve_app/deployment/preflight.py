"""Checks of a model's files before anything starts: weights, tokenizer and chat template are complete and belong to the
model."""

from __future__ import annotations

from pathlib import Path

from placement.checkpoint.header import check_tensors
from placement.model.spec import ModelError, ModelSpec
from serve_app.text.model_files import TextFiles, read_text_files
from serve_app.text.template import TemplateError
from serve_app.text.tokenizer import TokenizerError


def check_files(path: Path, spec: ModelSpec) -> TextFiles:
    """Check the headers and read the text files, without the weights. Raises `ModelError`, which names the file (and tensor) at
    fault."""
    check_tensors(path, spec)
    try:
        return read_text_files(path)
    except (TokenizerError, TemplateError) as error:
        raise ModelError(str(error)) from error
