"""``shardwright cluster``: the machines on which a layout can be placed, as a table, a drawing or JSON."""

from __future__ import annotations

import sys
from typing import Literal

import typer
from pydantic import BaseModel, ConfigDict

from placement.explain.cluster_text import as_text
from serve_app.commands.connection import connected


class ClusterArgs(BaseModel):
    """Arguments of the command. Its JSON output is a `ClusterSpec`, which other commands read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    measure: bool = False


def run_cluster(args: ClusterArgs, as_json: bool) -> None:
    """Print the nodes and links of the running cluster, as a table, or as JSON (a `ClusterSpec`) with `as_json`.

    Exits with 2 if no cluster answers, or a node does not take part in the measurement.
    """
    with connected(args.address):
        from cluster.nodes.discover import available, best_device, discover
        from cluster.nodes.measure import MeasureError, measure
        from cluster.nodes.topology import free_slots

        device = best_device() if args.device == "auto" else args.device
        free = available()
        try:
            spec = measure(discover(device), pairs=args.measure)
        except MeasureError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from error
        typer.echo(spec.model_dump_json(exclude_none=True) if as_json else as_text(spec, free_slots(spec, free, device)))
