"""What the parts of the application are called in Ray Serve."""

from __future__ import annotations

APP_NAME = "shardwright"
ENGINE = "Engine"
"""Replicas that answer requests: the decode pool, where there are two."""
PREFILL = "Prefill"
INGRESS = "Ingress"
