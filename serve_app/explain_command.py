"""``shardwright explain``: what a layout means for a model, from its header alone. Nothing starts, nothing is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, NoReturn

import typer
from pydantic import BaseModel, ConfigDict, Field

from placement import checkpoint_header
from placement.explain import as_json, explain
from placement.explain_text import as_text
from placement.layout import Layout, LayoutError, Violation
from placement.model_spec import DType
from placement.safetensors_file import AbsentWeights
from placement.step_shape import StepShape
from serve_app.catalog import resolve


class ExplainArgs(BaseModel):
    """What was asked. `context` counts the tokens of a sequence once the step has run; None: only those of the step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    layout: str = ""
    tokens: int = Field(default=1, ge=1)
    batch: int = Field(default=1, ge=1)
    context: int | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"


def run_explain(args: ExplainArgs, as_json_text: bool) -> None:
    """Print the explanation. A layout the model cannot have ends with status 1; mistakes in the arguments raise.

    Weights need not be there; where they are, they must be the model's.

    Raises `LayoutError` or `ModelError`.
    """
    layout = Layout.parse(args.layout)
    files = resolve(args.model, header_only=True)
    spec = checkpoint_header.read(files.path)
    with suppress(AbsentWeights):
        checkpoint_header.check_tensors(files.path, spec)
    violations = layout.check(spec)
    if violations:
        _refuse(layout, violations, as_json_text)
    explained = explain(spec, layout, _step(args, spec.dtype, layout.attn_dp))
    typer.echo(json.dumps(as_json(explained, files.name)) if as_json_text else as_text(explained, files.name))


def _step(args: ExplainArgs, own_dtype: DType, lanes: int) -> StepShape:
    length = args.tokens if args.context is None else args.context
    if length < args.tokens:
        raise LayoutError(f"context {length} is shorter than the {args.tokens} tokens of the step, which it includes")
    dtype = own_dtype if args.dtype == "auto" else args.dtype
    return StepShape.of(args.batch, args.tokens, length - args.tokens, dtype, lanes=lanes)


def _refuse(layout: Layout, violations: Sequence[Violation], as_json_text: bool) -> NoReturn:
    """Say what is broken and what would work, and end with status 1: the answer is no."""
    if as_json_text:
        found = [violation.model_dump(mode="json") for violation in violations]
        typer.echo(json.dumps({"layout": str(layout), "violations": found}))
    else:
        lines = [f"layout {layout} cannot be used:", *(f"- {violation.message}" for violation in violations)]
        typer.echo("\n".join(lines), err=True)
    raise typer.Exit(1)
