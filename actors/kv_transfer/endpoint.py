"""The KV transfer endpoint of one rank: its KV cache and staging buffer as pools, its peers, and its transfers.

    writer                                     reader
                                               expect(name, copy, own table)  -> target (staging run or pages)
    connect(agent_metadata)  ←──────────── agent_metadata()
    send(peer, name, copy, own table, target)
              ══ bytes, then {name, part} ═══→ poll() -> names of the copies whose bytes are all in its pages

The reader reserves the target first and publishes it. The writers then write the copy, whole or in parts; each part is written
once. A tag notifies the reader of each part, and a copy is complete when its parts add up to the whole. A tag that matches no
expected copy (an aborted transfer, an unknown writer) is counted and has no other effect. `forget` cancels an expected copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import msgpack
import torch
from pydantic import ValidationError

from actors.kv_transfer.compatibility import Compatibility
from actors.kv_transfer.pages import CacheShape, copy_ranges, copy_slots
from actors.kv_transfer.staging import Staging, gather, is_small, scatter
from actors.kv_transfer.transport import STAGING, Notice, Ranges, Transfer, TransferError, Transport, flat_bytes
from actors.model.kv.kv_cache import KVCache
from actors.wire.message import Message
from placement.ownership.handoff import Copy, Holding
from placement.ownership.handoff_pages import PageTable
from placement.ownership.handoff_positions import PeriodicPositions

_MALFORMED = (ValidationError, ValueError, TypeError, msgpack.UnpackException)


class AgentMetadata(Message):
    """The description of a rank that the ranks which will write to it receive."""

    compatibility: Compatibility
    shape: CacheShape
    description: bytes


class CopyTarget(Message):
    """The target of a copy on the reader: the first byte of a run of its staging buffer, or None for the pages themselves."""

    staged_at: int | None


class _Tag(Message):
    """The notification of an arrived part: the name of its copy, the part's ranges as (start, stop), and where it was staged.

    `name` is the same on both sides and is used for one copy only.
    """

    name: str
    layers: tuple[int, int]
    kv_heads: tuple[int, int]
    window: tuple[int, int]
    period: int
    runs: list[tuple[int, int]]
    staged_at: int | None

    @classmethod
    def of(cls, name: str, part: Copy, staged_at: int | None) -> _Tag:
        """Returns the tag of `part`, a part of the copy named `name`. `staged_at` is its first byte in the reader's staging
        buffer, or None if it is written straight into the pages."""
        positions = part.positions
        return cls(
            name=name,
            layers=_ends(part.layers),
            kv_heads=_ends(part.kv_heads),
            window=_ends(positions.window),
            period=positions.period,
            runs=[_ends(run) for run in positions.runs],
            staged_at=staged_at,
        )

    def part(self, whole: Copy) -> Copy:
        """Returns the part of `whole` that the tag describes. Raises `ValueError` if it does not lie inside `whole`."""
        runs, window = [range(*run) for run in self.runs], range(*self.window)
        ordered = all(one.stop <= other.start for one, other in pairwise([*runs, range(self.period, self.period)]))
        if not (ordered and all(run.start >= 0 for run in runs) and window.start >= 0):
            raise ValueError(f"runs {self.runs} of every {self.period} in {self.window} are no positions")
        positions = PeriodicPositions(window, self.period, tuple(runs))
        part = Copy(whole.source, whole.destination, range(*self.layers), range(*self.kv_heads), positions)
        inside = _is_in(part.layers, whole.layers) and _is_in(part.kv_heads, whole.kv_heads)
        if not (inside and _is_in(window, whole.positions.window)):
            raise ValueError(
                f"layers {part.layers}, heads {part.kv_heads}, positions {window} are not those that were reserved"
            )
        return part


@dataclass(frozen=True)
class Peer:
    """A connected rank, which can be written to."""

    name: str
    shape: CacheShape


@dataclass
class _Expected:
    copy: Copy
    table: PageTable
    target: CopyTarget
    missing: int
    """Number of (layer, head, position) triples that have not arrived yet."""


class Sending:
    """A copy that is being sent. Its pages must not change until `is_done` returns true, which also frees the staging run."""

    def __init__(self, transfer: Transfer, staging: Staging, staged_at: int | None) -> None:
        self._transfer, self._staging, self._staged_at = transfer, staging, staged_at

    def is_done(self) -> bool:
        """Returns whether all bytes have arrived at the peer. Raises `TransferError` if the write has failed. The staging run
        is released once the bytes have arrived or the write has failed."""
        try:
            done = self._transfer.is_done()
        except TransferError:
            self._release()
            raise
        if done:
            self._release()
        return done

    def abandon(self) -> None:
        """Release the staging run of an unfinished write. The peer must be disconnected before anything else is staged."""
        self._release()

    def _release(self) -> None:
        if self._staged_at is not None:
            self._staging.release(self._staged_at)
            self._staged_at = None


class KVEndpoint:
    """The KV transfer endpoint of one rank, see the module.

    `held` describes what the rank holds of every sequence. `staging_bytes` is the size of the buffer through which small slices
    are sent; 0 turns staging off.
    """

    def __init__(
        self, transport: Transport, cache: KVCache, held: Holding, compatibility: Compatibility, staging_bytes: int = 64 << 20
    ) -> None:
        self.compatibility, self.shape, self.device = compatibility, CacheShape.of(cache, held), cache.device
        self.num_stray = 0
        """Number of notices that matched no expected copy."""
        self._transport, self._cache = transport, cache
        self._staging = Staging(flat_bytes(torch.zeros(staging_bytes, dtype=torch.uint8, device=cache.device)))
        self._expected: dict[str, _Expected] = {}
        pools = {layer: cache.pages(layer) for layer in held.layers}
        transport.register(pools | ({STAGING: self._staging.memory} if staging_bytes else {}))

    @property
    def bytes_sent(self) -> int:
        """Payload bytes of all writes that have begun."""
        return self._transport.bytes_sent

    @property
    def num_expected(self) -> int:
        """Number of copies that have been expected and have not arrived."""
        return len(self._expected)

    def agent_metadata(self) -> bytes:
        """Returns the packed agent metadata of this rank, the argument of a writer's `connect`. Raises `TransferError` if a
        NIXL transport is closed."""
        description = self._transport.describe()
        return AgentMetadata(compatibility=self.compatibility, shape=self.shape, description=description).pack()

    def connect(self, agent_metadata: bytes) -> Peer:
        """Connect to the rank with this agent metadata, and return it, so that `send` can write to it.

        Raises `IncompatiblePeerError` if the two sides cannot exchange KV, and `TransferError` if the metadata cannot be read
        or the rank cannot be reached.
        """
        try:
            found = AgentMetadata.unpack(agent_metadata)
        except _MALFORMED as error:
            raise TransferError(f"agent metadata of {len(agent_metadata)} bytes cannot be read: {error}") from None
        self.compatibility.require(found.compatibility, "the peer")
        return Peer(self._transport.connect(found.description), found.shape)

    def expect(self, name: str, copy: Copy, table: PageTable) -> CopyTarget:
        """Prepare for a copy into the pages of `table`, this rank's pages of the sequence, and return its target for the
        writers. `name` identifies the copy on both sides. The caller must keep the pages allocated until the copy has arrived
        or is forgotten.

        The copy is staged if the staging buffer has room and its page ranges, as laid out on this side, are small. Raises
        `ValueError` if `name` is in use.
        """
        if name in self._expected:
            raise ValueError(f"a copy {name!r} is expected already")
        small = is_small(*self._ranges_here(copy, table))
        staged = self._staging.reserve(self.num_bytes(copy)) if small else None
        self._expected[name] = _Expected(copy, table, CopyTarget(staged_at=staged), _num_units(copy))
        return self._expected[name].target

    def forget(self, name: str) -> None:
        """Stop expecting the copy `name`, and release its staging run; does nothing if it is not expected.

        Its pages must not be reused while its writer may still write, that is, before the writer has acknowledged the abort or
        has been disconnected.
        """
        expected = self._expected.pop(name, None)
        if expected is not None and expected.target.staged_at is not None:
            self._staging.release(expected.target.staged_at)

    def send(self, peer: Peer, name: str, copy: Copy, table: PageTable, target: CopyTarget, peer_table: PageTable) -> Sending:
        """Begin to write a copy, or a part of one, to a connected peer, and return the write in progress. `name` is that of the
        whole copy on the peer.

        The values are read from this rank's pages of the sequence, `table`, and must have been computed. They go to the peer's
        pages of the sequence, `peer_table`, if `target.staged_at` is None, else to this byte of the peer's staging buffer; for
        a part, that is the first byte of the part. Raises `StagingFullError` if this side's staging buffer has no room (try
        again once another write is done), `TransferError` if the write cannot begin, and `ValueError` for byte ranges outside
        the pools.
        """
        tag = _Tag.of(name, copy, target.staged_at).pack()
        if target.staged_at is None:
            self._settle()
            ranges = copy_ranges(copy, self.shape, table, peer.shape, peer_table)
            return Sending(self._transport.write(peer.name, ranges, tag), self._staging, None)
        size = self.num_bytes(copy)
        at = self._staging.reserve(size)
        if at is None:
            raise StagingFullError(
                f"{size:,} bytes to stage, {self._staging.num_reserved:,} in use here: wait for a copy to end"
            )
        try:
            gather(self._cache, self.shape.first_head, copy, copy_slots(copy, table), self._staging.view(at, self._cache, copy))
            self._settle()
            ranges = Ranges.single(STAGING, at, STAGING, target.staged_at, size)
            return Sending(self._transport.write(peer.name, ranges, tag), self._staging, at)
        except Exception:
            self._staging.release(at)
            raise

    def poll(self) -> list[str]:
        """Returns the names of the expected copies that have fully arrived since the last call, with values in their pages;
        they are no longer expected.

        Does not wait for peers. Notices that match no expected copy are counted in `num_stray`.
        """
        return [name for notice in self._transport.poll() if (name := self._arrived(notice)) is not None]

    def disconnect(self, peer: Peer) -> None:
        """Disconnect from `peer`, which ends the writes to it; does nothing if it is not connected."""
        self._transport.disconnect(peer.name)

    def close(self) -> None:
        """Close the transport. No write may be in progress."""
        self._transport.close()

    def _arrived(self, notice: Notice) -> str | None:
        """Process a notice. Returns the name of its copy if the copy is complete with it, else None."""
        try:
            tag = _Tag.unpack(notice.tag)
            expected = self._expected[tag.name]
            part = tag.part(expected.copy)
            self._check_staged(expected, part, tag.staged_at)
        except (*_MALFORMED, KeyError):
            self.num_stray += 1
            return None
        if tag.staged_at is not None:
            staged = self._staging.view(tag.staged_at, self._cache, part)
            scatter(self._cache, self.shape.first_head, part, copy_slots(part, expected.table), staged)
            self._settle()
        expected.missing -= _num_units(part)
        if expected.missing > 0:
            return None
        self.forget(tag.name)
        return tag.name

    def _check_staged(self, expected: _Expected, part: Copy, staged_at: int | None) -> None:
        """Raises `ValueError` if a part was staged outside the run of its copy."""
        if staged_at is None:
            return
        start, end = expected.target.staged_at, staged_at + self.num_bytes(part)
        if start is None or not start <= staged_at <= end <= start + self.num_bytes(expected.copy):
            raise ValueError(
                f"bytes {staged_at}..{end} of the staging buffer are not of this copy's run, which begins at {start}"
            )

    def _ranges_here(self, copy: Copy, table: PageTable) -> tuple[int, int]:
        """Returns the number of byte ranges that a copy has in this side's pages, and its size in bytes."""
        ranges = copy_ranges(copy, self.shape, table, self.shape, table)
        return len(ranges), ranges.num_bytes

    def num_bytes(self, copy: Copy) -> int:
        """Returns the size in bytes of the KV values of a copy."""
        return _num_units(copy) * self.shape.planes * self.shape.token_bytes

    def _settle(self) -> None:
        """Wait until the device has run all queued work, because the transport does not observe CUDA streams."""
        if self._cache.device.type == "cuda":
            torch.cuda.current_stream(self._cache.device).synchronize()


def _num_units(copy: Copy) -> int:
    return len(copy.layers) * len(copy.kv_heads) * len(copy.positions)


def _ends(span: range) -> tuple[int, int]:
    return span.start, span.stop


def _is_in(part: range, whole: range) -> bool:
    return whole.start <= part.start <= part.stop <= whole.stop


class StagingFullError(TransferError):
    """Raised when the staging buffer has no room for a copy at the moment."""
