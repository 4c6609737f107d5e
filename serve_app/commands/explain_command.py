"""``shardwright explain``: explain a layout for a model from its headers alone. Nothing is started or loaded.

With ``--prefill`` and ``--decode`` it explains the KV hand-off between two pools (`placement.ownership.handoff`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NoReturn

import typer
from pydantic import BaseModel, ConfigDict, Field

from placement.checkpoint import header as checkpoint_header
from placement.checkpoint.directory.text_file import read_text
from placement.checkpoint.hf.safetensors_file import AbsentWeights
from placement.cost.step_shape import StepShape
from placement.explain.assignment_text import assignment_json, assignment_lines
from placement.explain.explain_text import as_text
from placement.explain.explanation import as_json, explain
from placement.explain.handoff_text import explain_handoff, handoff_json, handoff_text
from placement.layout.layout import Layout, LayoutError
from placement.legality.check import Violation, check
from placement.model.spec import DType, ModelSpec
from placement.nodes.hardware import ClusterSpec
from serve_app.deployment.catalog import resolve

HANDOFF_TOKENS = 4096
"""Default length in tokens of the prompt that is handed off."""


class ExplainArgs(BaseModel):
    """Arguments of the command. `context` is the number of tokens of a sequence after the step; None: only those of the step.

    With `prefill` and `decode` (layouts) it is the length of the prompt that is handed off.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    layout: str = ""
    tokens: int = Field(default=1, ge=1)
    batch: int = Field(default=1, ge=1)
    context: int | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    cluster: str | None = None
    """Path of a file written by ``shardwright cluster --json``."""
    prefill: str | None = None
    decode: str | None = None


def run_explain(args: ExplainArgs, as_json_text: bool) -> None:
    """Print the explanation of a layout, or of a hand-off between two pools; as JSON with `as_json_text`.

    Exits with 1 after printing the violated rules if a layout is illegal for the model or the cluster. Weights may be absent;
    if they are present, they must be those of the model. Raises `LayoutError` for arguments that contradict each other or
    cannot be read, and `ModelError` for a model that cannot be read.
    """
    pools = _pools(args)
    layout = Layout.parse(args.layout)
    files = resolve(args.model, header_only=True)
    spec = checkpoint_header.read(files.path)
    with suppress(AbsentWeights):
        checkpoint_header.check_tensors(files.path, spec)
    cluster = _cluster(args)
    for asked in pools or [layout]:
        violations = check(asked, spec, cluster)
        if violations:
            _refuse(asked, violations, as_json_text)
    if pools:
        _explain_handoff(args, pools, spec, files.name, as_json_text)
        return
    step = _step(args, spec.dtype, layout.attn_dp)
    explained = explain(spec, layout, step)
    if as_json_text:
        assignments = {} if cluster is None else {"seats": assignment_json(spec, layout, step, cluster)}
        typer.echo(json.dumps(as_json(explained, files.name) | assignments))
        return
    typer.echo(as_text(explained, files.name))
    if cluster is not None:
        typer.echo("\n" + "\n".join(assignment_lines(spec, layout, step, cluster)))


def _cluster(args: ExplainArgs) -> ClusterSpec | None:
    """Returns the cluster in the file. Raises `LayoutError` if the file holds none."""
    if args.cluster is None:
        return None
    if args.prefill is not None or args.decode is not None:
        raise LayoutError("--cluster is for one layout: a hand-off between two pools is not placed yet")
    try:
        return ClusterSpec.model_validate_json(read_text(Path(args.cluster)))
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise LayoutError(f"--cluster {args.cluster} is not what `shardwright cluster --json` writes: {first}") from error


def _pools(args: ExplainArgs) -> list[Layout]:
    """Returns the layouts of the prefill and the decode pool; an empty list if none are given."""
    given = {name: text for name, text in (("--prefill", args.prefill), ("--decode", args.decode)) if text is not None}
    if not given:
        return []
    if len(given) == 1:
        [name] = given
        raise LayoutError(f"{name} {given[name]!r} is one end of a hand-off: give --prefill and --decode")
    if args.layout:
        raise LayoutError(f"--layout {args.layout!r} beside --prefill and --decode: each pool has a layout of its own")
    if (args.tokens, args.batch) != (1, 1):
        raise LayoutError("--tokens and --batch describe a step; for a hand-off, give the length of the prompt with --context")
    return [Layout.parse(text) for text in given.values()]


def _explain_handoff(args: ExplainArgs, pools: list[Layout], spec: ModelSpec, name: str, as_json_text: bool) -> None:
    tokens = HANDOFF_TOKENS if args.context is None else args.context
    if tokens < 1:
        raise LayoutError(f"context {tokens}: a prompt that is handed off has at least one token")
    found = explain_handoff(spec, pools[0], pools[1], tokens, spec.dtype if args.dtype == "auto" else args.dtype)
    typer.echo(json.dumps(handoff_json(found, name)) if as_json_text else handoff_text(found, name))


def _step(args: ExplainArgs, own_dtype: DType, dp_size: int) -> StepShape:
    length = args.tokens if args.context is None else args.context
    if length < args.tokens:
        raise LayoutError(f"context {length} is shorter than the {args.tokens} tokens of the step, which it includes")
    dtype = own_dtype if args.dtype == "auto" else args.dtype
    return StepShape.of(args.batch, args.tokens, length - args.tokens, dtype, dp_size=dp_size)


def _refuse(layout: Layout, violations: Sequence[Violation], as_json_text: bool) -> NoReturn:
    """Print the violated rules and the alternatives, and exit with status 1."""
    if as_json_text:
        found = [violation.model_dump(mode="json") for violation in violations]
        typer.echo(json.dumps({"layout": str(layout), "violations": found}))
    else:
        lines = [f"layout {layout} cannot be used:", *(f"- {violation.message}" for violation in violations)]
        typer.echo("\n".join(lines), err=True)
    raise typer.Exit(1)
