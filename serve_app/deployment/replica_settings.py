"""Turns the settings of a service into those of its replicas. The model's header is read, and impossible settings are refused.

Nothing starts here: layout, memory and KV tiers are checked against the model's header and the known part of the cluster.
"""

from __future__ import annotations

from typing import Any, Literal

from cluster.replica.options import ReplicaOptions
from cluster.replica.settings import ReplicaSettings
from placement.checkpoint import header as checkpoint_header
from placement.cost import kv_budget, memory
from placement.cost.activations import StepLimits
from placement.layout.layout import Layout, LayoutError
from placement.legality import memory_fit
from placement.legality.check import require
from placement.model.spec import DType, ModelSpec
from placement.nodes.hardware import ClusterSpec, cpu_has_bfloat16
from placement.ownership import handoff
from serve_app.deployment import rebalancing
from serve_app.deployment.catalog import resolve
from serve_app.deployment.settings import ServeArgs


def replica_settings(
    args: ServeArgs,
    device: Literal["cpu", "cuda"],
    cluster: ClusterSpec | None = None,
    devices: int | None = None,
    header_only: bool = False,
) -> ReplicaSettings:
    """Returns the settings of one replica of the layout ``args.layout``, on ranks of `device`. Reads only the model's headers,
    which it may download.

    `devices`: number of ranks that share the cluster, if there are more than those of the layout. `header_only`: whether the
    model may lack its weights here, because other machines load them.
    """
    files = resolve(args.model, header_only=header_only)
    spec = checkpoint_header.read(files.path)
    layout = Layout.parse(args.layout)
    _require(args, spec, layout, cluster)
    dtype = compute_dtype(args.dtype, spec, device)
    options = {name: getattr(args, name) for name in ReplicaOptions.model_fields}
    options |= _tiers(args, spec, layout, dtype)
    options |= _memory(args, spec, layout, dtype, cluster, devices or layout.devices)
    return ReplicaSettings(model_path=str(files.path), spec=spec, layout=layout, device=device, dtype=dtype, **options)


def compute_dtype(asked: Literal["auto"] | DType, spec: ModelSpec, device: str) -> DType:
    """Returns the type to compute in on `device` (``cpu`` or ``cuda``): `asked`, or for ``auto`` the checkpoint's own.

    For ``auto`` on a CPU, where float16 is slow, it is bfloat16, or float32 if the checkpoint is float32 or quantised, or if
    the CPU has no bfloat16 instructions. Values of a quantised file are not bfloat16 numbers, and rounding makes small
    quantised models incoherent.
    """
    if asked != "auto":
        return asked
    if device != "cpu":
        return spec.dtype
    return "bfloat16" if spec.quantization is None and spec.dtype != "float32" and cpu_has_bfloat16() else "float32"


def _require(args: ServeArgs, spec: ModelSpec, layout: Layout, cluster: ClusterSpec | None) -> None:
    """Raises `LayoutError` with all faults of the layout and of the requested expert rebalancing."""
    refused = rebalancing.refusal(args.rebalance_every, args.rebalance_skew, spec, layout, cluster)
    try:
        require(layout, spec, cluster)
    except LayoutError as error:
        raise LayoutError("\n".join(filter(None, (str(error), refused)))) from None
    if refused:
        raise LayoutError(refused)


def _tiers(args: ServeArgs, spec: ModelSpec, layout: Layout, dtype: DType) -> dict[str, Any]:
    """Returns the directory of the KV tiers as an absolute path.

    Raises `LayoutError` if the model's KV blocks cannot be offloaded, or the directory's limit is too small for one block.
    """
    if args.host_cache or args.disk_cache is not None:
        handoff.holdings(spec, handoff.Side(layout))
    if "disk_cache_bytes" in args.model_fields_set:
        block = max(rank.block_bytes for rank in memory.rank_memories(spec, Layout(), dtype))
        kv_budget.require_disk_cache(args.disk_cache_bytes, block, dtype)
    return {"disk_cache": None if args.disk_cache is None else args.disk_cache.absolute()}


def _memory(
    args: ServeArgs, spec: ModelSpec, layout: Layout, dtype: DType, cluster: ClusterSpec | None, devices: int
) -> dict[str, int | None]:
    """Returns the maximum sequence length and the KV bytes of a rank (None: the rank's device decides).

    Raises `LayoutError`, which says what would fit if the memory of `cluster` does not suffice.
    """
    try:
        return _budget(args, spec, layout, dtype, cluster, devices)
    except memory.MemoryBudgetError as error:
        raise memory.MemoryBudgetError(f"{error}. {_what_fits(args, spec, layout, dtype, cluster, devices)}") from None


def _budget(
    args: ServeArgs, spec: ModelSpec, layout: Layout, dtype: DType, cluster: ClusterSpec | None, devices: int
) -> dict[str, int | None]:
    needs = memory.rank_memories(spec, layout, dtype)
    length = kv_budget.longest_sequence(needs, spec.max_position, args.max_model_len, args.kv_bytes)
    limits = StepLimits(args.max_batch_tokens, args.max_sequences, length)
    needs = memory.rank_memories(spec, layout, dtype, limits=limits)
    share = None
    if cluster is not None:
        kv_budget.require_host_cache(args.host_cache, devices, cluster)
        share = kv_budget.share_of_node(cluster, devices, layout, args.host_cache)
    if share is not None and args.max_model_len is None:
        length = kv_budget.length_within(needs, share, length)
    kv_bytes = args.kv_bytes if share is None else kv_budget.rank_kv_bytes(needs, share, args.kv_bytes, length)
    return {"max_model_len": length, "kv_bytes": kv_bytes}


def _what_fits(
    args: ServeArgs, spec: ModelSpec, layout: Layout, dtype: DType, cluster: ClusterSpec | None, devices: int
) -> str:
    """Returns what could be asked for instead, as a sentence: the same layout with less KV cache or a narrower type, or
    the nearest layouts that fit the memory of `cluster`."""

    def fits(layout: Layout, dtype: DType, changed: ServeArgs) -> dict[str, int | None] | None:
        others = devices - asked.devices
        try:
            return _budget(changed, spec, layout, dtype, cluster, others + layout.devices)
        except LayoutError:
            return None

    asked, ways = layout, list[str]()
    if args.kv_bytes is not None and (found := fits(layout, dtype, args.model_copy(update={"kv_bytes": None}))):
        ways.append(f"kv_bytes={found['kv_bytes']}")
    if args.max_model_len is not None and (found := fits(layout, dtype, args.model_copy(update={"max_model_len": None}))):
        ways.append(f"max_model_len={found['max_model_len']}")
    if args.host_cache and fits(layout, dtype, args.model_copy(update={"host_cache": 0})):
        ways.append("no host_cache")
    if dtype == "float32" and spec.quantization is None and fits(layout, "bfloat16", args):
        ways.append("dtype=bfloat16")
    if not ways:
        smaller = memory_fit.nearest_that_fit(layout, spec, cluster, lambda other: fits(other, dtype, args) is not None)
        ways += [f"layout {other}" for other in smaller]
    return f"This would fit: {' or '.join(ways)}" if ways else "No layout of this model fits here"
