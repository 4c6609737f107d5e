"""Names of the application's parts in Ray Serve."""

from __future__ import annotations

APP_NAME = "shardwright"
"""Name of the application that `serve` deploys. A Serve file may use another (`serve_app.deployment.applications`)."""
IMPORT_PATH = "serve_app.app:build"
"""Import path of the application in a Serve file."""
ENGINE = "Engine"
"""Name of the deployment that answers requests; with several pools, the decode pool."""
PREFILL = "Prefill"
MIXED = "Mixed"
POOL_OF = {ENGINE: "decode", MIXED: "mixed", PREFILL: "prefill"}
"""The initial role of each pool's replicas (`cluster.replica.roles`), which is also the value of the node labels.

Requests go to the first of these pools that exists.
"""
INGRESS = "Ingress"
