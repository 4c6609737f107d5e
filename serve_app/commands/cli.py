"""The command line. Exit status: 0 good, 1 the answer is no, 2 a mistake in what was asked."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from placement.model.errors import ReportedError
from serve_app.commands.options import admits
from serve_app.commands.render_args import NOT_RENDERED, RenderArgs
from serve_app.deployment.catalog import BUILT_IN, DEFAULT_MODEL, installed
from serve_app.deployment.settings import ServeArgs

app = typer.Typer(name="shardwright", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Model = Annotated[str, typer.Argument(help="A Hugging Face folder, a GGUF file, a hub id, or a built-in name.")]
Address = Annotated[
    str | None, typer.Option(help="Ray cluster; default: RAY_ADDRESS, else the one a command on this machine embeds.")
]
Application = Annotated[
    str | None, typer.Option("--name", help="The application, as render named it; default: shardwright, else the only one.")
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@app.command()
@admits(ServeArgs)
def serve(
    args: ServeArgs,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for every interface.")] = "127.0.0.1",
    address: Annotated[
        str | None, typer.Option(help="Ray cluster to join; default: RAY_ADDRESS, else an embedded one.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Take the place of an application that runs on the cluster already.")
    ] = False,
    nodes: Annotated[
        str | None, typer.Option(help="Embed so many Ray nodes of so many slots on this machine, for example 2x4.")
    ] = None,
    json_logs: Annotated[bool, typer.Option("--json", help="Log lines as JSON.")] = False,
) -> None:
    """Serve MODEL on an OpenAI endpoint until Ctrl-C."""
    from cluster.embedded.local import EmbeddedShape
    from serve_app.commands.serve_command import run_server

    shape = None if nodes is None else EmbeddedShape.parse(nodes)
    run_server(args, host=host, port=port, address=address, json_logs=json_logs, shape=shape, replace=replace)


@app.command()
def explain(
    model: Model = DEFAULT_MODEL,
    layout: Annotated[str, typer.Option(help="Parallel layout, for example tp=2,pp=2.")] = "",
    tokens: Annotated[int, typer.Option(help="New tokens each sequence runs in the step.")] = 1,
    batch: Annotated[int, typer.Option(help="Sequences in the step.")] = 1,
    context: Annotated[
        int | None, typer.Option(help="Tokens of each sequence in the KV cache, those of the step included.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's own), float32, bfloat16 or float16.")] = "auto",
    prefill: Annotated[
        str | None, typer.Option(help="With --decode: what a prefill pool of this layout hands to a decode pool.")
    ] = None,
    decode: Annotated[str | None, typer.Option(help="Layout of the decode pool; --context is the prompt's length.")] = None,
    cluster: Annotated[str | None, typer.Option(help="A file of `shardwright cluster --json`: who sits where on it.")] = None,
    as_json: Json = False,
) -> None:
    """Say what LAYOUT means for MODEL: who holds what, who talks to whom, bytes and memory. Reads the header only."""
    from serve_app.commands.explain_command import ExplainArgs, run_explain

    fields = {
        "model": model,
        "layout": layout,
        "tokens": tokens,
        "batch": batch,
        "context": context,
        "dtype": dtype,
        "cluster": cluster,
    }
    pools = {"prefill": prefill, "decode": decode}
    run_explain(ExplainArgs.model_validate({**fields, **pools}), as_json)


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="A running endpoint.")] = "http://127.0.0.1:8000",
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.7,
    api_key: Annotated[str | None, typer.Option(help="Bearer key of the endpoint.")] = None,
) -> None:
    """Chat in the terminal with a running endpoint; answers stream."""
    from serve_app.commands.chat_command import run_chat

    run_chat(url, system=system, max_tokens=max_tokens, temperature=temperature, api_key=api_key)


@app.command()
def verify(
    model: Model = DEFAULT_MODEL,
    layout: Annotated[str, typer.Option(help="Parallel layout to check, for example tp=3 or tp=2,pp=2.")] = "",
    tokens: Annotated[int | None, typer.Option(min=2, help="Tokens of the longest of four prompts; default 64.")] = None,
    processes: Annotated[bool, typer.Option("--processes", help="Ranks as processes, not as threads of this one.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    as_json: Json = False,
) -> None:
    """Does LAYOUT compute what one rank computes? Exit status 0: yes, within rounding; 1: no."""
    from serve_app.commands.verify_command import VerifyArgs, run_verify

    args = VerifyArgs.model_validate(
        {"model": model, "layout": layout, "tokens": tokens, "processes": processes, "dtype": dtype}
    )
    run_verify(args, as_json=as_json)


@app.command()
@admits(RenderArgs, leave_out=NOT_RENDERED)
def render(args: RenderArgs) -> None:
    """Write the files that bring LAYOUT to machines: `ray up`, KubeRay, or a Serve file."""
    from serve_app.commands.render_command import run_render

    run_render(args)


@app.command()
def cluster(
    address: Address = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda: what the slots are counted in.")] = "auto",
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the link between each two nodes (half a second each).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the nodes, slots, domains and links of a cluster."""
    from serve_app.commands.cluster_command import ClusterArgs, run_cluster

    run_cluster(ClusterArgs.model_validate({"address": address, "device": device, "measure": measure}), as_json)


@app.command()
def status(address: Address = None, name: Application = None, as_json: Json = False) -> None:
    """Show what runs on a cluster: deployments, replicas, and where each rank is. Exit status 1: nothing serves."""
    from serve_app.commands.status_command import run_status

    run_status(address, as_json, name)


@app.command()
def role(
    replica: Annotated[str, typer.Argument(help="Its name, as status shows it.")],
    becomes: Annotated[str, typer.Argument(metavar="prefill|decode|mixed")],
    within: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for what it has to finish first; then it stays what it is.")
    ] = 120.0,
    address: Address = None,
    name: Application = None,
    as_json: Json = False,
) -> None:
    """Change what a replica of a pool takes, once it has finished what it then takes no more. Exit status 1: it did not."""
    from serve_app.commands.role_command import run_role

    run_role(replica, becomes, within, address, as_json, name)


@app.command()
def models(as_json: Json = False) -> None:
    """List the built-in models and whether they are installed."""
    rows: list[dict[str, Any]] = [
        {"name": each.name, "about": each.about, "installed": installed(each), "install": each.install}
        for each in BUILT_IN.values()
    ]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table("name", "about", "installed")
    for row in rows:
        table.add_row(row["name"], row["about"], "yes" if row["installed"] else f"no: {row['install']}")
    Console().print(table)


def main() -> None:
    """Entry point: mistakes become one message on stderr and exit status 2."""
    try:
        app()
    except ValidationError as error:
        _usage("; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']} (given: {e['input']!r})" for e in error.errors()))
    except ReportedError as error:
        _usage(str(error))


def _usage(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)
