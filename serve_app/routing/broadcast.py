"""Control calls to all replicas of a deployment. A replica that does not answer soon counts as lost."""

from __future__ import annotations

from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

LOST = (RayError, RayServeException)
"""Errors that Ray raises if a replica is gone."""

_ANSWER_S = 5.0


async def broadcast(pool: DeploymentHandle[Any], method: str, *arguments: object) -> list[Any]:
    """Call `method` on each replica. Returns the answers, with an exception for each missing one."""
    try:
        answers = pool.broadcast(method, *arguments).results_async(timeout_s=_ANSWER_S, return_exceptions=True)
        return list(await answers)
    except (*LOST, TimeoutError) as error:
        return [error]
