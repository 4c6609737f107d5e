"""Request router of Ray Serve: the preferred replica of a request, else the one with the fewest requests, except those that
have just refused it. With several pools, `pooled_backend.py` chooses the preferred replica.

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
        """See `RequestRouter.initialize_state`. Sets the counts to 0."""
        self._ongoing: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """See `RequestRouter.choose_replicas`. Returns one group: the preferred replica of the request if it is a candidate,
        else the candidates with the fewest requests, of which Serve takes one.

        Replicas that the request excludes are left out, unless all are excluded.
        """
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
        """See `RequestRouter.on_request_routed`. Counts one more request on the replica."""
        self._ongoing[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """See `RequestRouter.on_request_completed`. Counts one request less on the replica, however the request ended."""
        self._ongoing[replica_id] -= 1
        if self._ongoing[replica_id] <= 0:
            del self._ongoing[replica_id]
