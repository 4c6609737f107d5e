"""Request router of Ray Serve: the preferred replica of a request, else the one with the fewest requests, except those that
have just refused it.

Ray Serve sends this module to every caller by value, so it stays small and imports nothing of this project.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica


class EngineRouter(RequestRouter):
    """Routes by the number of requests that this process has sent.

    The call's ``excluded_replicas`` are avoided and its ``preferred_replica`` is taken (see `serve_app.routing.handle_backend`
    and `serve_app.routing.pooled_backend`). A replica that is restarting its ranks refuses at once, so it always has the fewest
    requests: without `excluded_replicas`, it would be asked again and again while another one could serve.
    """

    def initialize_state(self, **_settings: Any) -> None:
        """Initialise the counts. Called by Serve once."""
        self._ongoing: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the replicas with the fewest requests, of which Serve takes one."""
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
        """Count a request. Called by Serve when a replica was given it."""
        self._ongoing[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count a request down. Called by Serve when it has ended, however it ended."""
        self._ongoing[replica_id] -= 1
        if self._ongoing[replica_id] <= 0:
            del self._ongoing[replica_id]
