"""``shardwright verify``: check that a layout computes what one rank computes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.table import Table

from placement.checkpoint import header
from placement.layout import sequence_parallel
from placement.layout.layout import Layout, LayoutError
from placement.legality.check import require
from placement.model.spec import ModelSpec
from placement.ownership.context import BLOCK_TOKENS
from serve_app.deployment.catalog import DEFAULT_MODEL, ModelFiles, resolve
from serve_app.deployment.preflight import check_files
from serve_app.deployment.replica_settings import compute_dtype
from serve_app.text.model_files import read_text_files

if TYPE_CHECKING:
    from actors.verify.report import CaseReport, Departure, Report
    from actors.wire.rank_config import RankConfig

_TOKENS = 64
_GENERATE = 6
"""Number of tokens generated after each prompt."""
_TEXT = (
    "A lighthouse keeper counts the ships that pass and writes each one into a book. On a clear day there are forty; in fog "
    "there may be none, and then he writes down the fog. The book has 1,204 pages. When it is full, he begins another, and "
    "the first goes to the library in town, where nobody has asked for it yet: def ships(day): return len(book[day]). "
)


class VerifyArgs(BaseModel):
    """Arguments of the command."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = DEFAULT_MODEL
    layout: str = ""
    tokens: Annotated[int, Field(ge=2)] | None = None
    """Length of the longest prompt in tokens. None: 64, or as many as a step with sequence parallelism needs."""
    processes: bool = False
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"


def run_verify(args: VerifyArgs, *, as_json: bool) -> None:
    """Compare the layout's results with those of one rank on this machine's CPU, print the report (as JSON with `as_json`), and
    exit: with 0 if they agree within rounding, else with 1.

    Raises `ModelError` if the model cannot be read, and `LayoutError` if the layout is illegal or the prompts are longer than
    the model's context.
    """
    files = resolve(args.model)
    config = _config(args, files)
    prompts = make_prompts(files, config.spec, _longest(args, config.layout))
    report = _verified(args, config, prompts).model_copy(update={"model": files.name})
    if as_json:
        print(report.model_dump_json())
    else:
        _show(report)
    raise SystemExit(0 if report.verdict == "rounding" else 1)


def _config(args: VerifyArgs, files: ModelFiles) -> RankConfig:
    from actors.wire.rank_config import RankConfig

    spec = header.read(files.path)
    layout = Layout.parse(args.layout)
    require(layout, spec)
    tokens = _longest(args, layout)
    if tokens + _GENERATE > spec.max_position:
        raise LayoutError(
            f"tokens {tokens} and {_GENERATE} more are longer than the {spec.max_position} positions of the model"
        )
    check_files(files.path, spec)
    return RankConfig(
        world_rank=0,
        layout=layout.model_copy(update={"replicas": 1}),  # replicas are copies without communication between them
        spec=spec,
        model_path=str(files.path),
        device="cpu",
        dtype=compute_dtype(args.dtype, spec, "cpu"),
        block_size=BLOCK_TOKENS,
        threads_per_rank=1,
    )


def _longest(args: VerifyArgs, layout: Layout) -> int:
    """Returns the length of the longest prompt in tokens. All prompts together have about twice as many, which run in one
    step."""
    return args.tokens or max(_TOKENS, (sequence_parallel.scatter_from(layout) or 0) // 2)


def make_prompts(files: ModelFiles, spec: ModelSpec, longest: int) -> list[list[int]]:
    """Returns prompts (token ids) of up to four different lengths, the longest first, with `longest` tokens: text if the model
    has a tokenizer, else random ids. The same arguments always give the same prompts.

    Raises `TokenizerError` or `TemplateError` if the model's text files cannot be read.
    """
    lengths = sorted({longest, max(1, longest * 5 // 8), max(1, longest // 3), max(1, longest // 12)}, reverse=True)
    tokenizer = read_text_files(files.path).tokenizer
    if tokenizer is None:
        draw = random.Random(0)
        return [[draw.randrange(spec.vocab_size) for _ in range(length)] for length in lengths]
    tokens = tokenizer.encode(_TEXT, add_special_tokens=False)
    tokens = tokens * (1 + 2 * longest // len(tokens))
    return [tokens[11 * at : 11 * at + length] for at, length in enumerate(lengths)]


def _verified(args: VerifyArgs, config: RankConfig, prompts: list[list[int]]) -> Report:
    from actors.verify.processes import Workers
    from actors.verify.verification import Verification

    console = Console(stderr=True)
    with console.status("") as status:

        def on_progress(line: str) -> None:
            status.update(line)

        if not args.processes:
            return Verification(config, prompts, _GENERATE, on_progress=on_progress).run()
        with Workers(config.layout.world) as workers:
            return Verification(config, prompts, _GENERATE, start=workers.start, on_progress=on_progress).run()


def _show(report: Report) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{report.model} as {report.layout} in {report.dtype}, ranks as {report.ranks}, against one rank: prompts of "
        f"{', '.join(map(str, report.prompts))} tokens, {report.generated} more after each\n"
    )
    table = Table("case", "dtype", "max error", "tolerance", "greedy", "same bits twice", "", box=None, pad_edge=False)
    for case in report.cases:
        greedy = f"{case.clear - len(case.disagreements)} of {case.clear} clear" if case.clear else "none clear"
        table.add_row(
            case.name,
            case.dtype,
            f"{case.max_abs_error:.2g}",
            f"{case.tolerance:.2g}",
            greedy,
            "yes" if case.repeats else "no",
            case.verdict,
        )
    console.print(table)
    console.print(f"\nTolerance on logits, {report.tolerance_from}.")
    if report.routes is not None:
        console.print(f"Experts: {report.routes}.")
    console.print("A greedy choice is clear when its top-2 margin exceeds ten times the error.")
    for line in dict.fromkeys(line for case in report.cases for line in _complaints(case)):
        console.print(f"  {line}")
    for note in report.notes:
        console.print(f"Not exercised: {note}.")
    console.print(f"\n[bold]{report.verdict}[/]{_where(report.departs)} ({report.seconds:.1f} s)")


def _complaints(case: CaseReport) -> list[str]:
    wrong = [
        f"{case.name}, {case.dtype}: prompt {each.text}, position {each.position}: token {each.token} instead of "
        f"{each.expected}, margin {each.margin:.3g}"
        for each in case.disagreements
    ]
    return [*(f"{case.name}, {case.dtype}: {fault}" for fault in case.faults), *wrong]


def _where(departs: Departure | None) -> str:
    if departs is None:
        return ""
    if departs.layer == "head":
        return f": all layers agree; what follows them (norm, head) departs by {departs.error:.3g} (bound {departs.bound:.3g})"
    name = "the embedding" if departs.layer == "embedding" else f"layer {departs.layer}"
    return (
        f": {name} is the first to depart, by {departs.error:.3g} of a token's largest value (bound {departs.bound:.3g}), "
        f"worst on rank {departs.world_rank} in prompt {departs.text} at position {departs.position}"
    )
