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
        """Returns the node, address and process of this rank. Raises `AddressError` if the node has no usable address."""
        return self._rank.location(ray.get_runtime_context().get_node_id(), str(get_node_ip_address()))

    def serve_store(self, token: str, host: str) -> int:
        """Serve the rendezvous store on a free port of `host`, on world rank 0 only. Returns the port. See `Rank.serve_store`;
        `token` identifies this generation of ranks."""
        return self._rank.serve_store(token, host)

    def connect(self, rendezvous: Rendezvous) -> None:
        """Join this rank's communication groups. Raises `GroupError` if a peer does not join in time. See `Rank.connect`."""
        self._rank.connect(rendezvous)

    def load(self) -> Loaded:
        """Build this rank's pipeline stage and load its weights from the checkpoint. Returns their bytes and the free memory.
        Raises `ModelError`. See `Rank.load`."""
        return self._rank.load()

    def run(self, address: str, token: str, num_blocks: int, model_digest: str) -> None:
        """Run the plans of the engine that listens at the ZeroMQ `address`, with `num_blocks` KV blocks of the model with
        `model_digest`, until it closes the link.

        Raises whatever ends the rank earlier. See `Rank.run`; `token` identifies this generation of ranks to the engine.
        """
        self._rank.run(address, token, num_blocks, model_digest)

    @ray.method(concurrency_group="control")
    def progress(self) -> RankStatus:
        """Returns the status of this rank (see `Rank.status`). It is answered even while `run` occupies the actor's main
        thread."""
        return self._rank.status()

    @ray.method(concurrency_group="control")
    def report(self) -> RankReport:
        """Returns the location, coordinates in the layout, device and status of this rank. It is answered even while `run`
        occupies the actor's main thread. Raises `AddressError` as `where` does."""
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU") or []
        device = self._config.device
        return RankReport(
            location=self.where(),
            device=f"{device}:{','.join(map(str, gpus))}" if gpus else device,
            coords=asdict(self._rank.identity.coords),
            status=self._rank.status(),
        )
