"""Which engine replica a request goes to: the shorter queue of two, but not one that has just refused it.

Ray Serve carries this module to every caller by value, so it stays small and imports nothing of ours.
"""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class EngineRouter(RequestRouter):
    """Reads the replicas to avoid from the call's ``avoid`` argument (see `serve_app.handle_backend`).

    A replica that is making its ranks anew refuses at once, so its queue is always the shortest: without this, it would be
    asked again and again while another could serve.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Up to two replicas drawn at random; Serve takes the one with fewer requests."""
        avoid = () if pending_request is None else pending_request.kwargs.get("avoid", ())
        willing = [each for each in candidate_replicas if each.replica_id.unique_id not in avoid]
        return [random.sample(willing or candidate_replicas, min(2, len(willing or candidate_replicas)))]
