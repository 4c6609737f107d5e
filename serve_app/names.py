"""What the parts of the application are called in Ray Serve."""

from __future__ import annotations

APP_NAME = "shardwright"
ENGINE = "Engine"
INGRESS = "Ingress"
