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
    """Check that the checkpoint at `path` has all tensors of `spec`, from its headers without the weights, and read its
    tokenizer and chat template, which are returned.

    Raises `ModelError`, which names the file (and tensor) at fault, if a tensor is missing or wrong, or a text file cannot be
    used.
    """
    check_tensors(path, spec)
    try:
        return read_text_files(path)
    except (TokenizerError, TemplateError) as error:
        raise ModelError(str(error)) from error
