"""The tiers behind a device's pages: host memory, then a shared tier.

    keep   ──→ host memory ───────────────────────→ given up when it is full
    share  ──→ (a thread) ──→ shared tier ──→ ...
    fetch  ←── host memory ←── not whole there: the rest from the shared tier, which then lies in host memory too

A block is kept and shared at once, so giving it up in host memory costs nothing, and a process that is killed has lost only
what still waited to be written. Kept is all a rank has; of what several ranks have, each shares a part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from actors.kv_offload.assemble import assemble, covers
from actors.kv_offload.background import BackgroundWriter
from actors.kv_offload.host import HostTier
from actors.kv_offload.piece import BlockName, Form, Piece
from actors.kv_offload.shared import SharedTier


class Tiers:
    """Pieces of blocks of one model. `shared` may be absent; at most `queue_bytes` wait to be written to it."""

    def __init__(self, form: Form, host: HostTier, shared: SharedTier | None = None, queue_bytes: int = 256 << 20) -> None:
        self.form, self.host, self.shared = form, host, shared
        self.hits: Counter[str] = Counter()
        """Pieces that were fetched, by the lowest tier that was needed (``host``, ``shared``), and those that were not had
        (``miss``)."""
        self._writer = None if shared is None else BackgroundWriter(shared, queue_bytes)

    @property
    def num_unwritten(self) -> int:
        """Pieces that the shared tier does not have: too many waited, or a write failed."""
        return 0 if self._writer is None else self._writer.num_turned_away + self._writer.num_failed

    def keep(self, block: BlockName, piece: Piece, data: bytes) -> bool:
        """Put a piece into host memory; False where all there is pinned. Raises `ValueError` for data of another size."""
        self._check(block, piece, data)
        return self.host.store(block, piece, data)

    def share(self, block: BlockName, piece: Piece, data: bytes, place: int = 0) -> bool:
        """Have a piece written to the shared tier; False where there is none, or too much waits. Never waits.

        `place`: the block's in its sequence. Raises `ValueError` for data of another size.
        """
        self._check(block, piece, data)
        return self._writer is not None and self._writer.offer(block, piece, data, place)

    def has(self, block: BlockName, wanted: Piece) -> bool:
        """Whether `fetch` would find it now. Reads names, not bytes: a damaged file is noticed later."""
        return covers(wanted, self._everything(block))

    def count(self, blocks: Sequence[BlockName], wanted: Iterable[Piece]) -> int:
        """How many of `blocks`, from the first on, are there with every one of the pieces: the length of a prefix hit."""
        pieces = list(wanted)
        for index, block in enumerate(blocks):
            if not all(self.has(block, piece) for piece in pieces):
                return index
        return len(blocks)

    def fetch(self, block: BlockName, wanted: Piece, place: int = 0) -> bytes | None:
        """The bytes of a piece, whatever pieces it was written in; None: a miss. `place`: the block's in its sequence."""
        data = assemble(self.form, wanted, self.host.pieces(block), lambda piece: self.host.load(block, piece))
        if data is not None:
            self.hits["host"] += 1
            return data
        data = assemble(self.form, wanted, self._everything(block), lambda piece: self._load(block, piece, place))
        self.hits["shared" if data is not None else "miss"] += 1
        if data is not None:
            self.host.store(block, wanted, data)
        return data

    def pin(self, blocks: Sequence[BlockName]) -> None:
        """Keep blocks that are about to be fetched, until `unpin`."""
        self.host.pin(blocks)
        if self.shared is not None:
            self.shared.pin(blocks)

    def unpin(self, blocks: Sequence[BlockName]) -> None:
        self.host.unpin(blocks)
        if self.shared is not None:
            self.shared.unpin(blocks)

    def flush(self, timeout_s: float) -> None:
        """Return when all that was shared has been written. Raises `TimeoutError`."""
        if self._writer is not None:
            self._writer.flush(timeout_s)

    def close(self, timeout_s: float = 30.0) -> None:
        """Write what waits, then end. Raises `TimeoutError`."""
        if self._writer is not None and self.shared is not None:
            self._writer.close(timeout_s)
            self.shared.close()

    def _check(self, block: BlockName, piece: Piece, data: bytes) -> None:
        if len(data) != self.form.num_bytes(piece):
            raise ValueError(
                f"piece {piece} of block {block} has {len(data)} bytes, but should have {self.form.num_bytes(piece)}"
            )

    def _everything(self, block: BlockName) -> list[Piece]:
        shared = [] if self.shared is None else self.shared.pieces(block)
        return list({*self.host.pieces(block), *shared})

    def _load(self, block: BlockName, piece: Piece, place: int) -> bytes | None:
        data = self.host.load(block, piece)
        return self.shared.load(block, piece, place) if data is None and self.shared is not None else data
