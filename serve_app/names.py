"""What the parts of the application are called in Ray Serve."""

from __future__ import annotations

APP_NAME = "shardwright"
ENGINE = "Engine"
"""Replicas that answer requests: the decode pool, where there are two."""
PREFILL = "Prefill"
POOL_OF = {ENGINE: "decode", PREFILL: "prefill"}
"""Where there are two pools, what each is called in labels of nodes (`cluster.topology.POOL_LABEL`)."""
INGRESS = "Ingress"
