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
    """Call `method` with `arguments` on each replica of the deployment behind the handle `pool`, at once.

    Returns the answers in no particular order, with the exception in place of each answer that is missing or later than 5 s. If
    the call as a whole fails, the list has only its exception.
    """
    try:
        answers = pool.broadcast(method, *arguments).results_async(timeout_s=_ANSWER_S, return_exceptions=True)
        return list(await answers)
    except (*LOST, TimeoutError) as error:
        return [error]
