"""Causal and sliding-window masks by true positions, as kernel calls that need no mask wherever possible.

The queries are a run of neighbouring positions. The keys are any ascending positions: a chunk, the two chunks of a zig-zag
rank, or the pages that one owner holds of a sequence. Example: queries 6-8 over the keys of three pass-KV steps::

    keys 0 1 2 | 3 4 5          all before 6: one rectangle, no mask
    keys 3 4 5 | 6 7 8          a rectangle for 3-5, the causal triangle for 6-8
    keys 9 10 11                no call

A mask is made only where the window excludes keys, or where some but not all positions among the queries are keys. It then
covers `_QUERY_BLOCK` queries at a time, and only the keys that these can see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Positions = NDArray[np.int64]

_QUERY_BLOCK = 128


@dataclass(frozen=True)
class MaskSpan:
    """One kernel call: some of the queries over some of the keys. `mask` is [1, 1, queries, keys] fp32, 0 or -inf."""

    queries: slice
    keys: slice
    causal: bool = False
    mask: Tensor | None = None


def mask_spans(spans: Sequence[range], keys: Positions, window: int | None, device: torch.device) -> list[MaskSpan]:
    """Return the kernel calls that cover every key that the queries can see. The queries are at the positions `spans`, laid end
    to end; `keys` are the ascending positions of the keys. Masks are made on `device`.

    A query at position p sees the keys ``[p - window + 1, p]``, or all up to p if `window` is None. Queries that see no key are
    in no call.
    """
    if not len(keys):
        return []
    starts = [0, *accumulate(map(len, spans))]
    if window is None and keys[-1] < min(span.start for span in spans):
        return [MaskSpan(slice(0, starts[-1]), slice(0, len(keys)))]
    calls = []
    for start, span in zip(starts, spans, strict=False):
        calls += [_moved(call, start) for call in _of_span(span, keys, window, device)]
    return calls


def _of_span(span: range, keys: Positions, window: int | None, device: torch.device) -> Iterator[MaskSpan]:
    stop = int(np.searchsorted(keys, span.stop))
    first = 0 if window is None else int(np.searchsorted(keys, span.start - window + 1))
    if first >= stop:
        return
    if window is not None and keys[first] <= span.stop - 1 - window:
        yield from _in_blocks(span, keys, window, device)
        return
    before = int(np.searchsorted(keys, span.start))
    everyone = slice(0, len(span))
    if first < before:
        yield MaskSpan(everyone, slice(first, before))
    if before < stop:
        among = slice(before, stop)
        if stop - before == len(span):  # the keys ascend and are as many as the positions: every position is a key
            yield MaskSpan(everyone, among, causal=True)
        else:
            yield MaskSpan(everyone, among, mask=_mask(span, keys[among], window, device))


def _in_blocks(span: range, keys: Positions, window: int, device: torch.device) -> Iterator[MaskSpan]:
    for start in range(0, len(span), _QUERY_BLOCK):
        block = span[start : start + _QUERY_BLOCK]
        seen = slice(int(np.searchsorted(keys, block.start - window + 1)), int(np.searchsorted(keys, block.stop)))
        if seen.start < seen.stop:
            yield MaskSpan(slice(start, start + len(block)), seen, mask=_mask(block, keys[seen], window, device))


def _mask(span: range, keys: Positions, window: int | None, device: torch.device) -> Tensor:
    at = torch.arange(span.start, span.stop, device=device)[:, None]
    key = torch.from_numpy(keys).to(device)
    visible = key <= at if window is None else (key <= at) & (key > at - window)
    return torch.zeros(visible.shape, device=device).masked_fill_(~visible, -torch.inf)[None, None]


def _moved(call: MaskSpan, by: int) -> MaskSpan:
    queries = slice(call.queries.start + by, call.queries.stop + by)
    return MaskSpan(queries, call.keys, call.causal, call.mask)
