"""The Ray actor of a rank. It adds what only Ray knows, and keeps torch out of all processes except the ranks' own."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import ray
from ray.util import get_node_ip_address

from actors.wire.rank_config import Loaded, RankConfig, RankLocation, RankReport, RankStatus, Rendezvous

if TYPE_CHECKING:
    from actors.rank.rank import Rank


class RankActor:
    """Holds a `Rank`, which is imported in the actor's process, so that the process that creates the actor needs no torch."""

    def __init__(self, config: RankConfig) -> None:
        from actors.rank.rank import Rank

        self._config = config
        self._rank: Rank = Rank(config)

    def where(self) -> RankLocation:
        """Returns the node, address and process of this rank."""
        return self._rank.location(ray.get_runtime_context().get_node_id(), str(get_node_ip_address()))

    def serve_store(self, token: str, host: str) -> int:
        """Calls `Rank.serve_store`."""
        return self._rank.serve_store(token, host)

    def connect(self, rendezvous: Rendezvous) -> None:
        """Calls `Rank.connect`."""
        self._rank.connect(rendezvous)

    def load(self) -> Loaded:
        """Calls `Rank.load`."""
        return self._rank.load()

    def run(self, address: str, token: str, num_blocks: int) -> None:
        """Calls `Rank.run`."""
        self._rank.run(address, token, num_blocks)

    @ray.method(concurrency_group="control")
    def progress(self) -> RankStatus:
        """Calls `Rank.status`. It is answered even while `run` occupies the actor's main thread."""
        return self._rank.status()

    @ray.method(concurrency_group="control")
    def report(self) -> RankReport:
        """Returns the location and status of this rank. It is answered even while `run` occupies the actor's main thread."""
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU") or []
        device = self._config.device
        return RankReport(
            location=self.where(),
            device=f"{device}:{','.join(map(str, gpus))}" if gpus else device,
            coords=asdict(self._rank.identity.coords),
            status=self._rank.status(),
        )
