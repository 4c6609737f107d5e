"""Assembly of a block part from stored parts that ranks of any layout wrote: the resharding of offloaded KV blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from actors.kv_offload.block_part import BlockPart, KVFormat
from placement.model.spec import DTYPE_BYTES

ReadBytes = Callable[[BlockPart], bytes | None]
"""Returns the bytes of a part, or None if it is gone or damaged."""


def assemble(kv_format: KVFormat, wanted: BlockPart, there: Iterable[BlockPart], load: ReadBytes) -> bytes | None:
    """Returns the bytes of `wanted`, assembled from its overlaps with the stored parts `there` of the same block, or None if
    they do not cover it. `load` returns the bytes of one of these parts, or None.

    The largest overlaps are used first, and a part is loaded only if it contributes something that is still missing. A part
    that cannot be loaded, or whose size does not match its name, is treated as absent.
    """
    overlaps = [(part, both) for part in there if (both := wanted.overlap(part)) is not None]
    overlaps.sort(key=lambda pair: (-pair[1].size, str(pair[0])))
    missing = np.ones((len(wanted.layers), len(wanted.kv_heads), len(wanted.positions)), bool)
    out = np.zeros(_shape(kv_format, wanted), np.uint8)
    for part, both in overlaps:
        into = _index(both.within(wanted))
        if not missing[into].any():
            continue
        data = load(part)
        if data is None or len(data) != kv_format.num_bytes(part):
            continue
        if part == wanted:
            return data
        layers, heads, positions = into
        source = np.frombuffer(data, np.uint8).reshape(_shape(kv_format, part))
        own_layers, own_heads, own_positions = _index(both.within(part))
        out[layers, :, heads, positions] = source[own_layers, :, own_heads, own_positions]
        missing[into] = False
        if not missing.any():
            return out.tobytes()
    return None


def covers(wanted: BlockPart, there: Iterable[BlockPart]) -> bool:
    """Returns whether the part `wanted` of a block can be assembled from the parts `there` of the same block."""
    missing = np.ones((len(wanted.layers), len(wanted.kv_heads), len(wanted.positions)), bool)
    for part in there:
        both = wanted.overlap(part)
        if both is not None:
            missing[_index(both.within(wanted))] = False
    return not missing.any()


def _shape(kv_format: KVFormat, part: BlockPart) -> tuple[int, ...]:
    value_bytes = kv_format.kv_dim * DTYPE_BYTES[kv_format.dtype]
    return len(part.layers), kv_format.planes, len(part.kv_heads), len(part.positions), value_bytes


def _index(part: BlockPart) -> tuple[slice, slice, slice]:
    return tuple(slice(each.start, each.stop) for each in (part.layers, part.kv_heads, part.positions))  # type: ignore[return-value]
