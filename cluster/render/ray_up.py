"""Files for `ray up`: a head without model work, workers with slots, the commands that make a machine ready and start Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from cluster.render.serve_file import Deployment
from cluster.render.start_commands import OWN_MACHINES, head_command, worker_command

Provider = Literal["local", "aws", "gcp"]

TOKEN = "~/.ray/auth_token"
"""Made once, on the machine that runs `ray up`, by ``ray get-auth-token --generate``."""

SOURCE = "~/shardwright-source"
VENV = "~/shardwright-venv"
INSTALL = (
    f"test -x {VENV}/bin/shardwright || (python3 -m venv {VENV} && "
    f"{VENV}/bin/pip install -q -c {SOURCE}/constraints.txt {SOURCE})",
    f"grep -q shardwright-venv ~/.bashrc || sed -i '1i export PATH={VENV}/bin:$PATH' ~/.bashrc",
)
"""Installs the checkout that `ray up` brings along, and puts it on the path of Ray's commands."""


def local_cluster(
    deployment: Deployment,
    head: str,
    workers: Sequence[str],
    ssh_user: str,
    ssh_key: str | None = None,
    setup: Sequence[str] = (),
) -> dict[str, Any]:
    """Machines that are there already, by address; `workers`: at least as many as the fleet has.

    `setup`: commands that ready a machine, instead of bringing this checkout along and installing it.
    """
    machine = deployment.fleet.machine
    return {
        "cluster_name": deployment.name,
        "provider": {"type": "local", "head_ip": head, "worker_ips": list(workers)},
        "auth": {"ssh_user": ssh_user, **({"ssh_private_key": ssh_key} if ssh_key else {})},
        "min_workers": len(workers),
        "max_workers": len(workers),
        "idle_timeout_minutes": 60 * 24,
        **_common(deployment, setup),
        "head_start_ray_commands": ["ray stop", head_command(machine, OWN_MACHINES)],
        "worker_start_ray_commands": ["ray stop", worker_command(machine)],
    }


def cloud_cluster(
    deployment: Deployment, provider: Literal["aws", "gcp"], instance: str, head_instance: str, place: dict[str, str]
) -> dict[str, Any]:
    """Machines that the cloud starts. `place`: region and zone (and GCP's project).

    The head has a type of its own, so that it never counts against the workers.
    """
    workers, machine = deployment.fleet.machines, deployment.fleet.machine
    resources = {"CPU": machine.slots} if machine.kind == "cpu" else {"CPU": machine.cpus, "GPU": machine.slots}
    types = {"aws": _aws_type, "gcp": _gcp_type}[provider]
    labels = {"shardwright/layout": deployment.name}
    return {
        "cluster_name": deployment.name,
        "max_workers": workers,
        "idle_timeout_minutes": 30,
        "provider": {"type": provider, **place, "cache_stopped_nodes": False},
        "auth": {"ssh_user": "ubuntu"},
        "head_node_type": "head",
        "available_node_types": {
            "head": {
                "resources": {"CPU": 0},
                "min_workers": 0,
                "max_workers": 0,
                "node_config": types(head_instance, 100),
            },
            "worker": {
                "resources": resources,
                "labels": labels,
                "min_workers": workers,
                "max_workers": workers,
                "node_config": types(instance, 500),
            },
        },
        **_common(deployment, ()),
        "head_start_ray_commands": ["ray stop", head_command(machine)],
        "worker_start_ray_commands": ["ray stop", worker_command(machine)],
    }


def _common(deployment: Deployment, setup: Sequence[str]) -> dict[str, Any]:
    return {
        "file_mounts": {TOKEN: TOKEN, **({} if setup else {SOURCE: "."})},
        "rsync_exclude": [".git", ".venv", "**/__pycache__"],
        "setup_commands": [f"chmod 600 {TOKEN}", *(setup or INSTALL), *_has_model(deployment.model)],
    }


def _has_model(model: str) -> list[str]:
    """A path must be there on every machine; a hub id is fetched by the ranks, into the cache of their user."""
    if not model.startswith(("/", "~", ".")):
        return []
    return [f"test -e {model} || (echo 'the model {model} is missing on this machine' >&2; exit 1)"]


def _aws_type(instance: str, disk_gb: int) -> dict[str, Any]:
    disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": disk_gb, "VolumeType": "gp3"}}
    return {"InstanceType": instance, "BlockDeviceMappings": [disk]}


def _gcp_type(instance: str, disk_gb: int) -> dict[str, Any]:
    image = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2204-lts"
    disk = {
        "boot": True,
        "autoDelete": True,
        "type": "PERSISTENT",
        "initializeParams": {"diskSizeGb": disk_gb, "sourceImage": image},
    }
    return {"machineType": instance, "disks": [disk]}
