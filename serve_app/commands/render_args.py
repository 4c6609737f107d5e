"""What may be asked of ``shardwright render``: the settings of the service, and the machines it is for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from placement.cost.units import ByteCount
from placement.model.bounds import PositiveInt
from serve_app.deployment.deployment_names import APP_NAME
from serve_app.deployment.settings import ServeArgs

NOT_RENDERED = {
    "api_keys": "keys are secrets, and do not belong into files like these: use api_keys_file",
    "ingress_node": "follows from the target",
    "nodes_wait_s": "the files start machines, and wait for them",
}
"""Settings of the service that the files decide, and why."""


class RenderArgs(ServeArgs):
    """The settings of a service, which go into the Serve file where they are given, and what its machines are like.

    `model` is read here, and `model_path` is where the machines find it.
    """

    model_config = ConfigDict(title="Files and machines")

    device: Literal["cpu", "cuda"] = "cpu"
    """What the ranks run on: cpu or cuda."""
    target: Literal["ray-up", "kuberay", "serve"] = "serve"
    """Files to write: ray-up, kuberay or serve."""
    name: str = APP_NAME
    """Every object's name begins with it."""
    model_path: str | None = None
    """Where the machines find the model, if not where it is here."""
    slots: PositiveInt = 8
    """Ranks one machine can run: its GPUs, or slots for CPU ranks."""
    cpus: PositiveInt | None = None
    """CPUs of one machine; default: its slots."""
    memory: Annotated[ByteCount, Field(ge=1)] = 64 * 2**30
    """Memory of one machine, for example 64GiB."""
    accelerator: str | None = None
    """Kind of GPU a machine must have (kuberay)."""
    prefill_machine: str = ""
    """How machines of the prefill pool differ: slots=4,cpus=8,memory=64GiB,accelerator=L40S (kuberay)."""
    decode_machine: str = ""
    """The same of the decode pool (kuberay)."""
    mixed_machine: str = ""
    """The same of the mixed pool (kuberay)."""
    image: str = "shardwright:latest"
    """Container image (kuberay)."""
    spare: Annotated[int, Field(ge=0)] = 0
    """Machines that stay free, for upgrades (kuberay)."""
    gateway_class: str | None = None
    """Gateway API class, for upgrades step by step (kuberay)."""
    provider: Literal["local", "aws", "gcp"] = "local"
    """Whose machines: local, aws or gcp (ray-up)."""
    head: str = ""
    """Address of the head (local)."""
    workers: tuple[str, ...] = ()
    """Address of a worker; once for each (local)."""
    ssh_user: str = "ubuntu"
    """User on the machines (local)."""
    ssh_key: str | None = None
    """Private key for the machines (local)."""
    instance: str = ""
    """Instance type of workers (aws, gcp)."""
    region: str = ""
    """Region (aws, gcp)."""
    zone: str = ""
    """Availability zone (aws, gcp)."""
    project: str = ""
    """Project (gcp)."""
    setup: tuple[str, ...] = ()
    """Command that readies a machine, instead of ours (local)."""
    out: Path | None = None
    """Folder for the files; default: print them."""

    @model_validator(mode="before")
    @classmethod
    def _leaves_to_the_files_what_they_decide(cls, given: Any) -> Any:
        for name in filter(NOT_RENDERED.__contains__, given):
            raise ValueError(f"{name} cannot be rendered: {NOT_RENDERED[name]}")
        return given

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the service that were given, as plain values, without those that the files have anyway."""
        theirs = RenderArgs.__annotations__.keys() | {"model", "layout", "prefill", "decode", "mixed"}
        return {name: value for name, value in self.model_dump(mode="json", exclude_unset=True).items() if name not in theirs}
