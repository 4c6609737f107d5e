"""Control calls to all replicas of a deployment, which must answer soon or count as lost."""

from __future__ import annotations

from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

LOST = (RayError, RayServeException)
"""What Ray raises where a replica is gone."""

_ANSWER_S = 5.0


async def broadcast(pool: DeploymentHandle[Any], method: str, *arguments: object) -> list[Any]:
    """The answer of each replica; an exception in place of the answer that did not come."""
    try:
        answers = pool.broadcast(method, *arguments).results_async(timeout_s=_ANSWER_S, return_exceptions=True)
        return list(await answers)
    except (*LOST, TimeoutError) as error:
        return [error]
