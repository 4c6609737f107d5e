"""What a person may ask of `serve`, checked as far as it can be before anything starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from actors.engine.config.balancing import USUAL_INTERVAL
from cluster.replica.settings import DEFAULT_CONTEXT, DEFAULT_DISK_BYTES, DEFAULT_KV_BYTES, ReplicaSettings
from placement.checkpoint import header as checkpoint_header
from placement.cost import memory
from placement.errors import ReportedError
from placement.layout.layout import Layout, LayoutError
from placement.legality.check import require
from placement.model.spec import DType, ModelSpec
from placement.nodes.hardware import ClusterSpec, cpu_has_bfloat16
from placement.ownership import handoff
from placement.ownership.context import BLOCK_TOKENS
from serve_app.deployment import rebalancing
from serve_app.deployment.catalog import DEFAULT_MODEL, ModelFiles, resolve

_UNITS = {"": 1, **{unit: 1000**power for power, unit in enumerate("KMGTP", 1)}}
_UNITS |= {f"{unit}I": 1024**power for power, unit in enumerate("KMGTP", 1)}
_PROCESS_BYTES = 250_000_000
"""What the process of a CPU rank takes before it holds anything: Python, torch and Ray, counting shared pages once."""


def _bytes(value: Any) -> Any:
    """``2GiB``, ``512M`` or a plain number as bytes. Raises `ValueError` on another text."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGTP]I?|)B?\s*", value.upper())
    if found is None:
        raise ValueError("must be a number of bytes, or one with a unit as in 512MiB or 2G")
    return int(float(found[1]) * _UNITS[found[2]])


ByteSize = Annotated[int, BeforeValidator(_bytes), Field(ge=1)]
PositiveCount = Annotated[int, Field(ge=1)]


class ServeArgs(BaseModel):
    """Arguments of the application, the same on the command line, in `serve run` and in a Serve file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = DEFAULT_MODEL
    layout: str = ""
    prefill: str = ""
    """With `decode` or `mixed`, in place of `layout`: pools, each a layout and how many replicas, as in ``tp=2*3``."""
    decode: str = ""
    mixed: str = ""
    """A pool of replicas that do both, by itself or beside the others."""
    require_prefill: bool = False
    """Whether requests are refused, and the service is not healthy, while prompts are not handed off between the pools."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: PositiveCount | None = None
    kv_bytes: ByteSize | None = None
    """KV cache of one rank, for example ``2GiB``."""
    max_batch_tokens: PositiveCount = 2048
    max_sequences: PositiveCount = 64
    max_waiting: PositiveCount = 1024
    plans_in_flight: Annotated[int, Field(ge=1, le=16)] | None = None
    """Plans given to the ranks ahead of the oldest result; by default one more than there are pipeline stages."""
    threads_per_rank: PositiveCount | None = None
    host_cache: Annotated[int, BeforeValidator(_bytes), Field(ge=0)] = 0
    """Host memory of each rank for KV blocks that its device gives up, for example ``4GiB``; 0: none."""
    disk_cache: str | None = None
    """A directory for KV blocks, which outlives the server and may be shared by several."""
    disk_cache_bytes: ByteSize | None = None
    """Bytes that all who use that directory may fill together; by default 16 GiB."""
    rebalance_every: Annotated[int, Field(ge=0)] | None = None
    """Steps between looks at how evenly experts are loaded; 0: none by time; by default 3,000 where ep > 1."""
    rebalance_skew: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Balancedness (mean over maximum of the ranks' tokens) below which to look at once."""
    step_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """A step that takes longer ends its ranks, which are made anew."""
    replica_wait_s: Annotated[float, Field(gt=0)] = 30.0
    """While no engine replica runs, a request waits for one so long (or its own time limit, if shorter); then it is refused."""
    nodes_wait_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds to wait for nodes that are still to start; 0: a layout that does not fit now is refused at once."""
    entrance: Literal["head", "anywhere"] = "head"
    """Where the HTTP process lives: on the head node, whatever happens to the others, or wherever Serve puts it."""
    served_name: str | None = None
    api_keys: tuple[str, ...] = ()
    api_keys_file: str | None = None
    """A file of further keys, one a line, where the HTTP process runs; one that is not there has none."""

    @field_validator("disk_cache")
    @classmethod
    def _names_a_directory(cls, path: str | None) -> str | None:
        if path is not None and not path.strip():
            raise ValueError("must name a directory, '.' for the working directory; leave it out for none")
        return path

    @field_validator("disk_cache_bytes")
    @classmethod
    def _bounds_a_directory(cls, limit: int | None, info: ValidationInfo) -> int | None:
        if limit is not None and info.data.get("disk_cache", "") is None:
            raise ValueError("bounds the directory of disk_cache, and there is none: give both, or leave it out")
        return limit


class ArgumentError(ReportedError, ValueError):
    """Arguments that mean nothing to `ServeArgs`: says which, and what would."""

    code = "bad_argument"


def read_api_keys(args: ServeArgs) -> tuple[str, ...]:
    """The keys that clients may send, those of the file included; none: no key is asked for."""
    path = None if args.api_keys_file is None else Path(args.api_keys_file)
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    return (*args.api_keys, *(line.strip() for line in lines if line.strip()))


def parse_args(arguments: Mapping[str, Any]) -> ServeArgs:
    """Raises `ArgumentError`, for all mistakes at once."""
    try:
        return ServeArgs.model_validate(arguments)
    except ValidationError as error:
        found = error.errors()
    unknown = [str(each["loc"][0]) for each in found if each["type"] == "extra_forbidden"]
    wrong = [
        f"{each['loc'][0]}: {each['msg']} (given: {each['input']!r})" for each in found if each["type"] != "extra_forbidden"
    ]
    if unknown:
        wrong.append(f"unknown: {', '.join(unknown)}; the arguments are {', '.join(ServeArgs.model_fields)}")
    raise ArgumentError("; ".join(wrong))


def replica_settings(
    args: ServeArgs, device: Literal["cpu", "cuda"], cluster: ClusterSpec | None = None, devices: int | None = None
) -> ReplicaSettings:
    """The settings of one replica. Reads the model's header only. Raises `ModelError` or `LayoutError`.

    `devices`: ranks that share the cluster, where there are others than those of the layout.
    """
    files = resolve(args.model)
    spec = checkpoint_header.read(files.path)
    layout = Layout.parse(args.layout)
    _require(args, spec, layout, cluster)
    if args.host_cache or args.disk_cache is not None:
        handoff.holdings(spec, handoff.Side(layout))  # a model whose blocks cannot leave their pages is refused here
    dtype = compute_dtype(args.dtype, spec, device)
    length = _context(args, spec, layout, dtype)
    share = None
    if cluster is not None:
        _require_host_cache(args, devices or layout.devices, cluster)
        share = _share(devices or layout.devices, layout, cluster)
    return ReplicaSettings(
        model_path=str(files.path),
        spec=spec,
        layout=layout,
        device=device,
        dtype=dtype,
        max_model_len=length,
        host_cache_bytes=args.host_cache,
        disk_cache=None if args.disk_cache is None else Path(args.disk_cache).absolute(),
        disk_cache_bytes=_disk_cache_bytes(args, spec, dtype),
        kv_bytes=_kv_bytes(args, spec, layout, dtype, length, share),
        max_batch_tokens=args.max_batch_tokens,
        max_sequences=args.max_sequences,
        max_waiting=args.max_waiting,
        plans_in_flight=args.plans_in_flight,
        threads_per_rank=args.threads_per_rank,
        rebalance_every=USUAL_INTERVAL if args.rebalance_every is None else args.rebalance_every,
        rebalance_skew=args.rebalance_skew,
        step_timeout_s=args.step_timeout_s,
        nodes_wait_s=args.nodes_wait_s,
    )


def served_name(args: ServeArgs, files: ModelFiles) -> str:
    """The name clients ask for."""
    return args.served_name or files.name


def compute_dtype(asked: Literal["auto"] | DType, spec: ModelSpec, device: str) -> DType:
    """As asked, else the checkpoint's own type; on a CPU, float16 is slow and becomes bfloat16, which becomes float32 where
    the CPU has no instructions for it. A quantised file is computed in float32 there: its values are no bfloat16 numbers,
    and small models lose sense with the bits they lose.
    """
    if asked != "auto":
        return asked
    if device != "cpu":
        return spec.dtype
    return "bfloat16" if spec.quantization is None and spec.dtype != "float32" and cpu_has_bfloat16() else "float32"


def _require(args: ServeArgs, spec: ModelSpec, layout: Layout, cluster: ClusterSpec | None) -> None:
    """Raises `LayoutError` with all that is wrong with the layout, and with what is asked of its experts."""
    refused = rebalancing.refusal(args.rebalance_every, args.rebalance_skew, spec, layout, cluster)
    try:
        require(layout, spec, cluster)
    except LayoutError as error:
        raise LayoutError("\n".join(filter(None, (str(error), refused)))) from None
    if refused:
        raise LayoutError(refused)


def _context(args: ServeArgs, spec: ModelSpec, layout: Layout, dtype: DType) -> int:
    """Longest sequence to serve: as asked, else the model's own limit, 8,192, or what the KV cache holds, if shorter."""
    asked = args.max_model_len or min(spec.max_position, DEFAULT_CONTEXT)
    if asked > spec.max_position:
        raise LayoutError(f"max_model_len {asked} is longer than the {spec.max_position} positions the model was made for")
    if args.kv_bytes is None:
        return asked
    needs = memory.rank_memories(spec, layout, dtype)
    fits = min(rank.tokens_in(args.kv_bytes) for rank in needs)
    if fits == 0 or (args.max_model_len and asked > fits):
        less = f", or max_model_len {fits} or less" if fits else ""
        raise LayoutError(
            f"kv_bytes {args.kv_bytes} holds {fits} tokens of a rank's KV cache, fewer than max_model_len {asked}: "
            f"give more kv_bytes{less}"
        )
    return min(asked, fits)


def _kv_bytes(args: ServeArgs, spec: ModelSpec, layout: Layout, dtype: DType, length: int, share: int | None) -> int | None:
    """KV cache of a CPU rank: as asked, else 1 GiB, or what its share of the node leaves beside its weights, if less.

    Raises `MemoryBudgetError` when the weights and one sequence of `length` tokens do not fit that share.
    """
    if share is None:
        return args.kv_bytes
    needs = memory.rank_memories(spec, layout, dtype)
    memory.num_blocks(needs, share, length)
    left = min(share - rank.weight_bytes for rank in needs)
    if args.kv_bytes is not None and args.kv_bytes > left:
        raise memory.MemoryBudgetError(
            f"kv_bytes {args.kv_bytes:,} is more than the {left:,} bytes that a rank's share of its node, {share:,} bytes, "
            f"leaves beside {max(rank.weight_bytes for rank in needs):,} bytes of weights"
        )
    return args.kv_bytes or min(DEFAULT_KV_BYTES, left)


def _disk_cache_bytes(args: ServeArgs, spec: ModelSpec, dtype: DType) -> int:
    """Raises `MemoryBudgetError` where not one block of the model fits."""
    if args.disk_cache_bytes is None:
        return DEFAULT_DISK_BYTES
    block = max(rank.block_bytes for rank in memory.rank_memories(spec, Layout(), dtype))
    if args.disk_cache_bytes < block:
        raise memory.MemoryBudgetError(
            f"disk_cache_bytes {args.disk_cache_bytes:,} is less than one KV block of {BLOCK_TOKENS} tokens takes, "
            f"{block:,} bytes in {dtype}: nothing would ever be found there"
        )
    return args.disk_cache_bytes


def _require_host_cache(args: ServeArgs, devices: int, cluster: ClusterSpec) -> None:
    """Raises `MemoryBudgetError` where the nodes together have less memory than is asked for KV blocks beside the ranks' own.
    Whether each node has its part is known once ranks are placed."""
    known = [node.memory_bytes for node in cluster.nodes if node.slots and node.kind == "cpu"]
    total = sum(each or 0 for each in known)
    if not known or None in known or args.host_cache * devices <= total:
        return
    raise memory.MemoryBudgetError(
        f"host_cache {args.host_cache:,} for each of {devices} ranks is {args.host_cache * devices:,} bytes, more than the "
        f"{total:,} bytes of memory there are: take less than {total // devices:,}"
    )


def _share(devices: int, layout: Layout, cluster: ClusterSpec) -> int | None:
    """What a rank can hold where its node is fullest: a node's memory over those of `devices` ranks it may have to hold, less
    what their processes take. None: not known. Raises `MemoryBudgetError` where the processes alone do not fit."""
    nodes = [(node, min(node.slots, devices)) for node in cluster.nodes if node.slots and node.memory_bytes]
    if not nodes:
        return None
    node, ranks = min(nodes, key=lambda each: (each[0].memory_bytes or 0) // each[1])
    left = (node.memory_bytes or 0) // ranks - _PROCESS_BYTES
    if left <= 0:
        raise memory.MemoryBudgetError(
            f"{layout} puts {ranks} ranks on node {node.name}: their processes alone take about {ranks * _PROCESS_BYTES:,} of "
            f"its {node.memory_bytes:,} bytes, before any weight"
        )
    return left
