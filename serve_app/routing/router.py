"""Which engine replica a request goes to: the one that was named for it, else the one with fewest requests, but not one that
has just refused it.

Ray Serve carries this module to every caller by value, so it stays small and imports nothing of ours.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica


class EngineRouter(RequestRouter):
    """Counts what this process has sent. Replicas to avoid are in the call's ``excluded_replicas``, the one to take is in
    ``preferred_replica`` (see
    `serve_app.routing.handle_backend` and `serve_app.routing.pooled_backend`).

    A replica that is making its ranks anew refuses at once, so it always has fewest requests: without `excluded_replicas`, it
    would be asked again and again while another could serve.
    """

    def initialize_state(self, **_settings: Any) -> None:
        """Called by Serve once."""
        self._ongoing: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas with fewest requests, of which Serve takes one."""
        asked = {} if pending_request is None else pending_request.kwargs
        named = [each for each in candidate_replicas if each.replica_id.unique_id == asked.get("preferred_replica")]
        if named:
            return [named]
        excluded_replicas = asked.get("excluded_replicas", ())
        willing = [
            each for each in candidate_replicas if each.replica_id.unique_id not in excluded_replicas
        ] or candidate_replicas
        fewest = min((self._ongoing[each.replica_id] for each in willing), default=0)
        return [[each for each in willing if self._ongoing[each.replica_id] == fewest]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Serve when a replica was given the request."""
        self._ongoing[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Serve when the request has ended, however it ended."""
        self._ongoing[replica_id] -= 1
        if self._ongoing[replica_id] <= 0:
            del self._ongoing[replica_id]
