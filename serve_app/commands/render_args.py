"""The options of ``shardwright render``: the settings of the service, and the machines on which it will run."""

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
"""Settings of the service that the rendered files decide, with the reason."""


class RenderArgs(ServeArgs):
    """The settings of a service, which the Serve file repeats if they are given, and the properties of its machines.

    `model` is read on this machine; `model_path` is the model's path on the target machines.
    """

    model_config = ConfigDict(title="Files and machines")

    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the ranks: cpu or cuda."""
    target: Literal["ray-up", "kuberay", "serve"] = "serve"
    """Kind of files to write: ray-up, kuberay or serve."""
    name: str = APP_NAME
    """Prefix of the names of all objects."""
    model_path: str | None = None
    """Path of the model on the machines, if it differs from the path here."""
    slots: PositiveInt = 8
    """Number of ranks on one machine: its GPUs, or slots for CPU ranks."""
    cpus: PositiveInt | None = None
    """CPUs of one machine; default: its number of slots."""
    memory: Annotated[ByteCount, Field(ge=1)] = 64 * 2**30
    """Memory of one machine, for example 64GiB."""
    accelerator: str | None = None
    """GPU model that the machines must have (kuberay)."""
    prefill_machine: str = ""
    """Differences of the prefill pool's machines: slots=4,cpus=8,memory=64GiB,accelerator=L40S (kuberay)."""
    decode_machine: str = ""
    """Differences of the decode pool's machines (kuberay)."""
    mixed_machine: str = ""
    """Differences of the mixed pool's machines (kuberay)."""
    image: str = "shardwright:latest"
    """Container image (kuberay)."""
    spare: Annotated[int, Field(ge=0)] = 0
    """Number of machines kept free for upgrades (kuberay)."""
    gateway_class: str | None = None
    """Gateway API class, for incremental upgrades (kuberay)."""
    provider: Literal["local", "aws", "gcp"] = "local"
    """Provider of the machines: local, aws or gcp (ray-up)."""
    head: str = ""
    """Address of the head machine (local)."""
    workers: tuple[str, ...] = ()
    """Address of a worker machine; repeat for each one (local)."""
    ssh_user: str = "ubuntu"
    """User name on the machines (local)."""
    ssh_key: str | None = None
    """Private SSH key for the machines (local)."""
    instance: str = ""
    """Instance type of the workers (aws, gcp)."""
    region: str = ""
    """Region (aws, gcp)."""
    zone: str = ""
    """Availability zone (aws, gcp)."""
    project: str = ""
    """Project (gcp)."""
    setup: tuple[str, ...] = ()
    """Command that prepares a machine, in place of the default ones; may be given several times (local)."""
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
        """The settings of the service that were given, as plain values, without those that the rendered files contain in any
        case (model, layouts and machines)."""
        theirs = RenderArgs.__annotations__.keys() | {"model", "layout", "prefill", "decode", "mixed"}
        return {name: value for name, value in self.model_dump(mode="json", exclude_unset=True).items() if name not in theirs}
