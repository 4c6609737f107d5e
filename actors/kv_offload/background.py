"""A background thread that writes block parts to the shared tier, so that the step loop never waits for a disk."""

from __future__ import annotations

import logging
from collections import deque
from threading import Condition, Thread

from actors.kv_offload.block_part import BlockName, BlockPart
from actors.kv_offload.shared import SharedTier

logger = logging.getLogger(__name__)


class BackgroundWriter:
    """Writes the parts that it is offered to `tier`, in order.

    At most `limit_bytes` are queued; further parts are rejected, so that a slow disk lowers the hit rate and does not delay
    steps.
    """

    def __init__(self, tier: SharedTier, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_turned_away = 0
        self.num_failed = 0
        self._tier = tier
        self._queue: deque[tuple[BlockName, BlockPart, bytes, int]] = deque()
        self._waiting_bytes = 0
        self._closed = False
        self._changed = Condition()
        self._thread = Thread(target=self._run, name="kv-tier-writer", daemon=True)
        self._thread.start()

    def offer(self, block: BlockName, part: BlockPart, data: bytes, place: int = 0) -> bool:
        """Queue the bytes `data` of a block's part to be written. Returns false if the queue is full or the writer is closed.
        Never blocks.

        `place` is the index of the block in its sequence, see `SharedTier.load`.
        """
        with self._changed:
            if self._closed or self._waiting_bytes + len(data) > self.limit_bytes:
                self.num_turned_away += 1
                return False
            self._queue.append((block, part, data, place))
            self._waiting_bytes += len(data)
            self._changed.notify_all()
            return True

    def flush(self, timeout_s: float) -> None:
        """Wait until all queued parts have been written or have failed. Raises `TimeoutError` after `timeout_s` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting_bytes == 0, timeout_s):
                raise TimeoutError(
                    f"{self._waiting_bytes:,} bytes are not yet written to the shared tier after {timeout_s:g} s"
                )

    def close(self, timeout_s: float) -> None:
        """Accept no more parts, write all queued ones and end the thread. Raises `TimeoutError` if that takes longer than
        `timeout_s` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"the tier's writer has not ended after {timeout_s:g} s; {self._waiting_bytes:,} bytes are queued"
            )

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            try:
                self.num_failed += not self._tier.store(*taken)
            except Exception:
                self.num_failed += 1
                logger.exception("a block could not be stored")
            with self._changed:
                self._waiting_bytes -= len(taken[2])
                self._changed.notify_all()

    def _take(self) -> tuple[BlockName, BlockPart, bytes, int] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            return self._queue.popleft() if self._queue else None
