"""The command line. Exit status: 0 good, 1 the answer is no, 2 a mistake in what was asked."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from placement.errors import ReportedError
from serve_app.deployment.catalog import BUILT_IN, DEFAULT_MODEL, installed

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
def serve(
    model: Model = DEFAULT_MODEL,
    layout: Annotated[str, typer.Option(help="Parallel layout, for example tp=2,pp=2 or replicas=2.")] = "",
    prefill: Annotated[
        str, typer.Option(help="With --decode, for --layout: a pool for prompts, layout and replicas as in tp=2*2.")
    ] = "",
    decode: Annotated[str, typer.Option(help="The pool for the tokens after them, for example pp=2*1.")] = "",
    mixed: Annotated[str, typer.Option(help="A pool for both, by itself or beside --prefill or --decode.")] = "",
    require_prefill: Annotated[
        bool, typer.Option("--require-prefill", help="Refuse requests while prompts are not handed off between the pools.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for every interface.")] = "127.0.0.1",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Longest sequence, in tokens.")] = None,
    kv_bytes: Annotated[str | None, typer.Option(help="KV cache of one rank, for example 2GiB.")] = None,
    host_cache: Annotated[str, typer.Option(help="Host memory of each rank for KV blocks its device gives up: 4GiB.")] = "0",
    disk_cache: Annotated[
        str | None, typer.Option(help="Directory for KV blocks that outlives the server; several may share it.")
    ] = None,
    disk_cache_bytes: Annotated[str | None, typer.Option(help="Bytes that directory may take; default 16GiB.")] = None,
    max_batch_tokens: Annotated[int, typer.Option(help="Tokens one step runs at most, on each DP rank.")] = 2048,
    max_sequences: Annotated[int, typer.Option(help="Sequences running at once at most, on each DP rank.")] = 64,
    threads: Annotated[int | None, typer.Option(help="CPU threads of one rank; default: an even share of the cores.")] = None,
    rebalance_every: Annotated[
        int | None,
        typer.Option(help="Steps between looks at how evenly experts are loaded; 0: never; default 3000 where ep > 1."),
    ] = None,
    rebalance_skew: Annotated[
        float | None,
        typer.Option(help="Look at once when the mean load of ranks with experts falls below this part of the largest."),
    ] = None,
    step_timeout: Annotated[
        float, typer.Option(help="Seconds after which a step counts as stuck, and its ranks are remade.")
    ] = 60.0,
    replica_wait: Annotated[
        float, typer.Option(help="Seconds a request waits for an engine replica while none runs, before it is refused.")
    ] = 30.0,
    served_name: Annotated[str | None, typer.Option(help="Name clients ask for.")] = None,
    api_key: Annotated[list[str] | None, typer.Option(help="Bearer key clients must send; may be given several times.")] = None,
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
    from serve_app.deployment.settings import ServeArgs

    args = ServeArgs.model_validate(
        {
            "model": model,
            "layout": layout,
            "prefill": prefill,
            "decode": decode,
            "mixed": mixed,
            "require_prefill": require_prefill,
            "device": device,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "kv_bytes": kv_bytes,
            "max_batch_tokens": max_batch_tokens,
            "max_sequences": max_sequences,
            "threads_per_rank": threads,
            "host_cache": host_cache,
            "disk_cache": disk_cache,
            "disk_cache_bytes": disk_cache_bytes,
            "rebalance_every": rebalance_every,
            "rebalance_skew": rebalance_skew,
            "step_timeout_s": step_timeout,
            "replica_wait_s": replica_wait,
            "served_name": served_name,
            "api_keys": api_key or (),
        }
    )
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
def render(
    model: Model = DEFAULT_MODEL,
    layout: Annotated[str, typer.Option(help="Parallel layout, for example tp=8,pp=2 or tp=2,replicas=2.")] = "",
    prefill: Annotated[str, typer.Option(help="With --decode, for --layout: a pool for prompts, as in tp=8*2.")] = "",
    decode: Annotated[str, typer.Option(help="The pool for the tokens after them, for example tp=8,pp=2*1.")] = "",
    mixed: Annotated[str, typer.Option(help="A pool for both, by itself or beside --prefill or --decode.")] = "",
    target: Annotated[str, typer.Option(help="ray-up, kuberay or serve.")] = "serve",
    name: Annotated[str, typer.Option(help="Every object's name begins with it.")] = "shardwright",
    model_path: Annotated[str | None, typer.Option(help="Where the machines find the model, if not where it is here.")] = None,
    slots: Annotated[int, typer.Option(help="Ranks one machine can run: its GPUs, or slots for CPU ranks.")] = 8,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    cpus: Annotated[int | None, typer.Option(help="CPUs of one machine; default: its slots.")] = None,
    memory: Annotated[str, typer.Option(help="Memory of one machine, for example 64GiB.")] = "64GiB",
    accelerator: Annotated[str | None, typer.Option(help="Kind of GPU a machine must have (kuberay).")] = None,
    prefill_machine: Annotated[
        str,
        typer.Option(help="How machines of the prefill pool differ: slots=4,cpus=8,memory=64GiB,accelerator=L40S (kuberay)."),
    ] = "",
    decode_machine: Annotated[str, typer.Option(help="The same of the decode pool (kuberay).")] = "",
    mixed_machine: Annotated[str, typer.Option(help="The same of the mixed pool (kuberay).")] = "",
    image: Annotated[str, typer.Option(help="Container image (kuberay).")] = "shardwright:latest",
    spare: Annotated[int, typer.Option(help="Machines that stay free, for upgrades (kuberay).")] = 0,
    gateway_class: Annotated[str | None, typer.Option(help="Gateway API class, for upgrades step by step (kuberay).")] = None,
    provider: Annotated[str, typer.Option(help="local, aws or gcp (ray-up).")] = "local",
    head: Annotated[str, typer.Option(help="Address of the head (local).")] = "",
    worker: Annotated[list[str] | None, typer.Option(help="Address of a worker; once for each (local).")] = None,
    ssh_user: Annotated[str, typer.Option(help="User on the machines (local).")] = "ubuntu",
    ssh_key: Annotated[str | None, typer.Option(help="Private key for the machines (local).")] = None,
    instance: Annotated[str, typer.Option(help="Instance type of workers (aws, gcp).")] = "",
    region: Annotated[str, typer.Option(help="Region (aws, gcp).")] = "",
    zone: Annotated[str, typer.Option(help="Availability zone (aws, gcp).")] = "",
    project: Annotated[str, typer.Option(help="Project (gcp).")] = "",
    setup: Annotated[list[str] | None, typer.Option(help="Command that readies a machine, instead of ours (local).")] = None,
    out: Annotated[str | None, typer.Option(help="Folder for the files; default: print them.")] = None,
) -> None:
    """Write the files that bring LAYOUT to machines: `ray up`, KubeRay, or a Serve file."""
    from serve_app.commands.render_command import RenderArgs, run_render

    given = {key: value for key, value in locals().items() if key in RenderArgs.model_fields and value is not None}
    run_render(RenderArgs.model_validate({**given, "workers": worker or ()}))


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
