"""The command line. Exit status: 0 for success, 1 for a negative result, 2 for an error in the request."""

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
    str | None, typer.Option(help="Ray cluster; default: RAY_ADDRESS, else the cluster embedded by a command on this machine.")
]
Application = Annotated[
    str | None,
    typer.Option("--name", help="Name of the application, as given to render; default: shardwright, else the only one."),
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@app.command()
@admits(ServeArgs)
def serve(
    args: ServeArgs,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all interfaces.")] = "127.0.0.1",
    address: Annotated[
        str | None, typer.Option(help="Ray cluster to join; default: RAY_ADDRESS, else an embedded one.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an application that already runs on the cluster.")
    ] = False,
    nodes: Annotated[
        str | None, typer.Option(help="Ray nodes and slots per node to embed on this machine, for example 2x4.")
    ] = None,
    json_logs: Annotated[bool, typer.Option("--json", help="Write log lines as JSON.")] = False,
) -> None:
    """Serve MODEL on an OpenAI-compatible endpoint until Ctrl-C."""
    from cluster.embedded.local import EmbeddedShape
    from serve_app.commands.serve_command import run_server

    shape = None if nodes is None else EmbeddedShape.parse(nodes)
    run_server(args, host=host, port=port, address=address, json_logs=json_logs, shape=shape, replace=replace)


@app.command()
def explain(
    model: Model = DEFAULT_MODEL,
    layout: Annotated[str, typer.Option(help="Parallel layout, for example tp=2,pp=2.")] = "",
    tokens: Annotated[int, typer.Option(help="Number of new tokens of each sequence in the step.")] = 1,
    batch: Annotated[int, typer.Option(help="Number of sequences in the step.")] = 1,
    context: Annotated[
        int | None, typer.Option(help="Number of tokens of each sequence in the KV cache, including those of the step.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Type of the weights and the KV cache: auto (the checkpoint's), float32, bfloat16 or float16.")
    ] = "auto",
    prefill: Annotated[
        str | None, typer.Option(help="Layout of a prefill pool; with --decode, explain the KV hand-off between the pools.")
    ] = None,
    decode: Annotated[
        str | None, typer.Option(help="Layout of the decode pool; --context is then the length of the prompt.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="File written by `shardwright cluster --json`: also explain the placement on that cluster."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain a layout for MODEL: weights and heads of each rank, groups, traffic and memory. Reads only the checkpoint's
    headers."""
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
    url: Annotated[str, typer.Option(help="URL of the running endpoint.")] = "http://127.0.0.1:8000",
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens in an answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="Sampling temperature; 0: greedy.")] = 0.7,
    api_key: Annotated[str | None, typer.Option(help="Bearer key of the endpoint.")] = None,
) -> None:
    """Chat with a running endpoint in the terminal, with streamed answers."""
    from serve_app.commands.chat_command import run_chat

    run_chat(url, system=system, max_tokens=max_tokens, temperature=temperature, api_key=api_key)


@app.command()
def verify(
    model: Model = DEFAULT_MODEL,
    layout: Annotated[str, typer.Option(help="Parallel layout to check, for example tp=3 or tp=2,pp=2.")] = "",
    tokens: Annotated[
        int | None,
        typer.Option(
            min=2, help="Number of tokens in the longest of four prompts; default: 64, or more for sequence parallelism."
        ),
    ] = None,
    processes: Annotated[bool, typer.Option("--processes", help="Run the ranks as processes, not as threads.")] = False,
    dtype: Annotated[str, typer.Option(help="Type to compute in: auto, float32 or bfloat16.")] = "auto",
    as_json: Json = False,
) -> None:
    """Check that a layout computes what one rank computes. Exit status: 0 if it does, within rounding; 1 if not."""
    from serve_app.commands.verify_command import VerifyArgs, run_verify

    args = VerifyArgs.model_validate(
        {"model": model, "layout": layout, "tokens": tokens, "processes": processes, "dtype": dtype}
    )
    run_verify(args, as_json=as_json)


@app.command()
@admits(RenderArgs, leave_out=NOT_RENDERED)
def render(args: RenderArgs) -> None:
    """Write the files that deploy a layout: for `ray up`, KubeRay, or Ray Serve."""
    from serve_app.commands.render_command import run_render

    run_render(args)


@app.command()
def cluster(
    address: Address = None,
    device: Annotated[str, typer.Option(help="Device whose slots are counted: auto, cpu or cuda.")] = "auto",
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the link between each pair of nodes (half a second per pair).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the nodes, slots, domains and links of a cluster."""
    from serve_app.commands.cluster_command import ClusterArgs, run_cluster

    run_cluster(ClusterArgs.model_validate({"address": address, "device": device, "measure": measure}), as_json)


@app.command()
def status(address: Address = None, name: Application = None, as_json: Json = False) -> None:
    """Show the application on a cluster: deployments, replicas, and the node of each rank. Exit status 1: not running."""
    from serve_app.commands.status_command import run_status

    run_status(address, as_json, name)


@app.command()
def role(
    replica: Annotated[str, typer.Argument(help="Name of the replica, as shown by status.")],
    becomes: Annotated[str, typer.Argument(metavar="prefill|decode|mixed", help="The new role.")],
    within: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the replica's current work; after that, its role stays unchanged.")
    ] = 120.0,
    address: Address = None,
    name: Application = None,
    as_json: Json = False,
) -> None:
    """Change the role of a replica in a pool, once it has finished the work that the new role does not include. Exit status 1:
    not changed."""
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
    """Run the command line with the arguments of this process, and exit with the command's status.

    An error in the request (`ValidationError` or `ReportedError`) becomes one message on stderr and exit status 2.
    """
    try:
        app()
    except ValidationError as error:
        _usage("; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']} (given: {e['input']!r})" for e in error.errors()))
    except ReportedError as error:
        _usage(str(error))


def _usage(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)
