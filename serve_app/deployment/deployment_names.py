"""What the parts of the application are called in Ray Serve."""

from __future__ import annotations

APP_NAME = "shardwright"
"""As `serve` calls it; a Serve file may call it otherwise (`serve_app.deployment.applications`)."""
IMPORT_PATH = "serve_app.app:build"
"""What a Serve file builds it from."""
ENGINE = "Engine"
"""Replicas that answer requests: the decode pool, where there are several."""
PREFILL = "Prefill"
MIXED = "Mixed"
POOL_OF = {ENGINE: "decode", MIXED: "mixed", PREFILL: "prefill"}
"""Where there are pools, the role of each one's replicas to begin with (`cluster.replica.roles`), as labels of nodes say it,
too. Requests go to the first pool there is."""
INGRESS = "Ingress"
