"""What the parts of the application are called in Ray Serve."""

from __future__ import annotations

APP_NAME = "shardwright"
"""As `serve` calls it; a Serve file may call it otherwise (`serve_app.applications`)."""
IMPORT_PATH = "serve_app.app:build"
"""What a Serve file builds it from."""
ENGINE = "Engine"
"""Replicas that answer requests: the decode pool, where there are several."""
PREFILL = "Prefill"
MIXED = "Mixed"
POOL_OF = {ENGINE: "decode", MIXED: "mixed", PREFILL: "prefill"}
"""Where there are pools, what each is called in labels of nodes (`cluster.topology.POOL_LABEL`)."""
INGRESS = "Ingress"
