"""The KV budget: bytes of KV cache per rank, the longest sequence that they allow, and the number of KV blocks.

    node memory ──/ranks──→ share_of_node ──- weights──→ rank_kv_bytes ──→ kv_blocks     CPU, before anything starts
    free device memory once the weights are loaded ────────────────────→ kv_blocks     CUDA, on the running ranks

The functions compute with the memory needs of `placement.cost.memory`. They raise `LayoutError`, usually `MemoryBudgetError`,
if something does not fit; the message has the numbers and a remedy.
"""

from __future__ import annotations

from collections.abc import Sequence

from placement.cost.memory import MemoryBudgetError, RankMemory, num_blocks
from placement.layout.layout import Layout, LayoutError
from placement.model.spec import DType
from placement.nodes.hardware import ClusterSpec, DeviceKind
from placement.ownership.context import BLOCK_TOKENS

USUAL_CONTEXT = 8192
"""Default length in tokens of the longest sequence; a model's own limit applies if it is shorter."""
_LEAST_CONTEXT = 1024
"""Length in tokens below which the longest sequence is not shortened to fit the memory."""
CPU_KV_BYTES = 2**30
"""Default KV cache of a CPU rank in bytes. The operating system commits the memory only as pages are used."""
_DEVICE_SHARE = 0.9
"""Default fraction of a device's free memory that the KV cache takes."""
_PROCESS_BYTES = 250_000_000
"""Bytes that a CPU rank's process takes before weights and KV: Python, torch and Ray, counting shared pages once."""


def usual_length(max_position: int, asked: int | None = None) -> int:
    """Returns the length in tokens of the longest sequence, before memory limits it: `asked`, or by default `max_position`, at
    most 8,192.

    `max_position` is the model's context length in tokens. Raises `LayoutError` if `asked` exceeds it.
    """
    length = asked or min(max_position, USUAL_CONTEXT)
    if length > max_position:
        raise LayoutError(f"max_model_len {length} is longer than the {max_position} positions the model was made for")
    return length


def longest_sequence(needs: Sequence[RankMemory], max_position: int, asked: int | None, kv_bytes: int | None) -> int:
    """Returns the length in tokens of the longest sequence to serve: `asked`, or the default of `usual_length`, limited by
    `kv_bytes`.

    `needs` has the memory needs of every rank of a replica; `kv_bytes` is the KV cache of each rank in bytes (None: no limit).
    Raises `LayoutError` if `asked` exceeds `max_position`, the model's context length, or if `kv_bytes` hold fewer tokens than
    `asked`, or none.
    """
    length = usual_length(max_position, asked)
    if kv_bytes is None:
        return length
    fits = min(rank.tokens_in(kv_bytes) for rank in needs)
    if fits == 0 or (asked and length > fits):
        less = f", or max_model_len {fits} or less" if fits else ""
        raise LayoutError(
            f"kv_bytes {kv_bytes} holds {fits} tokens of a rank's KV cache, fewer than max_model_len {length}: "
            f"give more kv_bytes{less}"
        )
    return min(length, fits)


def share_of_node(cluster: ClusterSpec, devices: int, layout: Layout, host_cache: int = 0) -> int | None:
    """Returns the bytes that a rank has for weights and KV on the node with the least memory per rank, or None if no node's
    memory is known. Nodes of unknown memory are ignored.

    A node's memory is divided by the number of ranks that may run on it: its slots, but at most `devices`, the number of all
    ranks on the cluster. 250 MB of each part are left for the rank's process, and `host_cache` bytes for its KV cache in host
    memory. `layout` is only named in the error. Raises `MemoryBudgetError` if nothing is left.
    """
    nodes = [(node, min(node.slots, devices)) for node in cluster.nodes if node.slots and node.memory_bytes]
    if not nodes:
        return None
    node, ranks = min(nodes, key=lambda each: (each[0].memory_bytes or 0) // each[1])
    left = (node.memory_bytes or 0) // ranks - _PROCESS_BYTES - host_cache
    if 0 >= left > -host_cache:
        raise MemoryBudgetError(
            f"host_cache {host_cache:,} for each of {ranks} ranks on node {node.name} leaves nothing of its "
            f"{node.memory_bytes:,} bytes for weights, beside about {ranks * _PROCESS_BYTES:,} of their processes: "
            f"take less than {left + host_cache:,}"
        )
    if left <= 0:
        raise MemoryBudgetError(
            f"{layout} puts {ranks} ranks on node {node.name}: their processes alone take about {ranks * _PROCESS_BYTES:,} of "
            f"its {node.memory_bytes:,} bytes, before any weight"
        )
    return left


def length_within(needs: Sequence[RankMemory], share: int, length: int) -> int:
    """Returns the length in tokens of the longest sequence, at most `length`, whose KV fits beside weights and activations into
    the `share` bytes of each rank.

    `needs` has the memory needs of every rank of a replica. Returns `length` itself if fewer than 1,024 tokens fit, which is
    too little to serve without being asked to: `rank_kv_bytes` then refuses it.
    """
    fits = min(rank.tokens_in(max(share - rank.fixed_bytes, 0)) for rank in needs)
    return fits if min(_LEAST_CONTEXT, length) <= fits < length else length


def rank_kv_bytes(needs: Sequence[RankMemory], share: int, asked: int | None, length: int) -> int:
    """Returns the bytes of KV cache of a rank that has `share` bytes for weights, activations and KV.

    The result is `asked` (in bytes), or by default 1 GiB, or what weights and activations leave, if less. `needs` has the
    memory needs of every rank of a replica. Raises `MemoryBudgetError` if these and one sequence of `length` tokens do not fit
    into `share`, or if `asked` does not fit beside them.
    """
    num_blocks(needs, share, length)
    tightest = max(needs, key=lambda rank: rank.fixed_bytes)
    left = share - tightest.fixed_bytes
    if asked is not None and asked > left:
        activations = f" and {tightest.activation_bytes:,} of activations" if tightest.activation_bytes else ""
        raise MemoryBudgetError(
            f"kv_bytes {asked:,} is more than the {left:,} bytes that a rank's share of its node, {share:,} bytes, "
            f"leaves beside {tightest.weight_bytes:,} bytes of weights{activations}"
        )
    return asked or min(CPU_KV_BYTES, left)


def kv_blocks(
    needs: Sequence[RankMemory], asked: int | None, free_bytes: Sequence[int], length: int, max_sequences: int
) -> int:
    """Returns the number of KV blocks of every rank, limited by the rank with the least room.

    `needs` has the memory needs of every rank of a replica. The number never exceeds what `max_sequences` sequences of `length`
    tokens can fill. `asked` is the KV budget of a rank in bytes. By default it is 90% of the smallest of `free_bytes`, the
    bytes left on each device beside the weights, without the activations, or 1 GiB if `free_bytes` is empty (CPU). Raises
    `MemoryBudgetError` if one sequence of `length` tokens does not fit.
    """
    fixed = [rank.fixed_bytes for rank in needs]
    if free_bytes and not asked:
        fixed = [rank.weight_bytes for rank in needs]
    budget = asked or (int(_DEVICE_SHARE * min(free_bytes)) if free_bytes else CPU_KV_BYTES)
    fits = num_blocks(needs, [beside + budget for beside in fixed], length)
    return min(fits, max_sequences * needs[0].blocks_of(length))


def host_bytes(
    rank: RankMemory, device: DeviceKind, kv_bytes: int | None, length: int, max_sequences: int, host_cache: int
) -> int:
    """Returns the bytes of host memory that a rank needs: for its process and its KV cache of `host_cache` bytes in host
    memory, and on a CPU also for its weights, activations and KV.

    `kv_bytes` is the KV cache of a CPU rank (None: 1 GiB), of which `max_sequences` sequences of `length` tokens may need less.
    """
    if device != "cpu":
        return _PROCESS_BYTES + host_cache
    most = max_sequences * rank.blocks_of(length) * rank.block_bytes
    return _PROCESS_BYTES + host_cache + rank.fixed_bytes + min(kv_bytes or CPU_KV_BYTES, most)


def require_host_cache(host_cache: int, devices: int, cluster: ClusterSpec) -> None:
    """Raises `MemoryBudgetError` if the CPU nodes together have less memory than `devices` times `host_cache` bytes.

    `host_cache` is the KV cache in host memory of each of `devices` ranks, in bytes. Nothing is checked if there is no CPU node
    or the memory of one is unknown. Each single node can be checked only once ranks are placed.
    """
    known = [node.memory_bytes for node in cluster.nodes if node.slots and node.kind == "cpu"]
    total = sum(each or 0 for each in known)
    if not known or None in known or host_cache * devices <= total:
        return
    raise MemoryBudgetError(
        f"host_cache {host_cache:,} for each of {devices} ranks is {host_cache * devices:,} bytes, more than the "
        f"{total:,} bytes of memory there are: take less than {total // devices:,}"
    )


def require_disk_cache(disk_cache_bytes: int, block: int, dtype: DType) -> None:
    """Raises `MemoryBudgetError` if `disk_cache_bytes`, the size of the KV cache on disk, is less than `block`: the bytes of
    one KV block of all layers. `dtype` is the block's data type, for the message."""
    if disk_cache_bytes < block:
        raise MemoryBudgetError(
            f"disk_cache_bytes {disk_cache_bytes:,} is less than one KV block of {BLOCK_TOKENS} tokens takes, "
            f"{block:,} bytes in {dtype}: nothing would ever be found there"
        )
