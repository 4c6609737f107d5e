"""Putting the piece that a rank needs together from pieces that other ranks wrote, under any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from actors.kv_offload.piece import Form, Piece
from placement.model.spec import DTYPE_BYTES

ReadBytes = Callable[[Piece], bytes | None]
"""The bytes of a piece; None where it is gone, or damaged."""


def assemble(form: Form, wanted: Piece, there: Iterable[Piece], load: ReadBytes) -> bytes | None:
    """The bytes of `wanted`, made of overlapping parts of the pieces that are `there`; None where some of it is missing.

    The largest parts are taken first, and only pieces with something still missing are loaded. A piece that cannot be loaded,
    or has another size than its name says, is as if it were not there.
    """
    parts = [(piece, both) for piece in there if (both := wanted.overlap(piece)) is not None]
    parts.sort(key=lambda part: (-part[1].size, str(part[0])))
    missing = np.ones((len(wanted.layers), len(wanted.kv_heads), len(wanted.positions)), bool)
    out = np.zeros(_shape(form, wanted), np.uint8)
    for piece, both in parts:
        into = _index(both.within(wanted))
        if not missing[into].any():
            continue
        data = load(piece)
        if data is None or len(data) != form.num_bytes(piece):
            continue
        if piece == wanted:
            return data
        layers, heads, positions = into
        source = np.frombuffer(data, np.uint8).reshape(_shape(form, piece))
        own_layers, own_heads, own_positions = _index(both.within(piece))
        out[layers, :, heads, positions] = source[own_layers, :, own_heads, own_positions]
        missing[into] = False
        if not missing.any():
            return out.tobytes()
    return None


def covers(wanted: Piece, there: Iterable[Piece]) -> bool:
    """Whether `wanted` could be put together from these."""
    missing = np.ones((len(wanted.layers), len(wanted.kv_heads), len(wanted.positions)), bool)
    for piece in there:
        both = wanted.overlap(piece)
        if both is not None:
            missing[_index(both.within(wanted))] = False
    return not missing.any()


def _shape(form: Form, piece: Piece) -> tuple[int, ...]:
    value_bytes = form.kv_dim * DTYPE_BYTES[form.dtype]
    return len(piece.layers), form.planes, len(piece.kv_heads), len(piece.positions), value_bytes


def _index(piece: Piece) -> tuple[slice, slice, slice]:
    return tuple(slice(each.start, each.stop) for each in (piece.layers, piece.kv_heads, piece.positions))  # type: ignore[return-value]
