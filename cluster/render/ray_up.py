"""Cluster files for `ray up`: a head that runs no ranks, workers with slots, and the setup and start commands of machines."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import islice
from typing import Any, Literal

from cluster.nodes.topology import POOL_LABEL
from cluster.render.legal import require_hosts, require_name
from cluster.render.serve_file import Deployment, MachineGroup
from cluster.render.start_commands import OWN_MACHINES, head_command, worker_command

Provider = Literal["local", "aws", "gcp"]

TOKEN = "~/.ray/auth_token"
"""Path of the authentication token, created once with ``ray get-auth-token --generate`` on the machine that runs `ray up`."""

SOURCE = "~/shardwright-source"
VENV = "~/shardwright-venv"
INSTALL = (
    f"test -x {VENV}/bin/shardwright || (python3 -m venv {VENV} && "
    f"{VENV}/bin/pip install -q -c {SOURCE}/constraints.txt {SOURCE}'[pools]')",
    f"grep -q shardwright-venv ~/.bashrc || sed -i '1i export PATH={VENV}/bin:$PATH' ~/.bashrc",
)
"""Shell commands that install the source tree that `ray up` copies, and put it on the path of Ray's commands."""


def local_cluster(
    deployment: Deployment,
    head: str,
    workers: Sequence[str],
    ssh_user: str,
    ssh_key: str | None = None,
    setup: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns the content of the cluster file of ``ray up`` for existing machines: `head` and `workers` are their addresses.

    `workers` should be at least as many as the deployment needs, which is not checked. The machines of the first pool come
    first, and machines left over take replicas of any pool. `ssh_user` is the user name on the machines, and `ssh_key` the path
    of the private key (None: SSH's default). `setup` are shell commands that prepare a machine; if given, they replace copying
    and installing this source tree.

    Raises `LayoutError` for an invalid name or address, and for a machine that is given twice.
    """
    require_name(deployment.name)
    require_hosts(head, workers)
    machine, left = deployment.machine, iter(workers)
    kept = {group.pool: list(islice(left, group.fleet.machines)) for group in deployment.groups if group.pool}
    return {
        "cluster_name": deployment.name,
        "provider": {"type": "local", "head_ip": head, "worker_ips": list(workers)},
        "auth": {"ssh_user": ssh_user, **({"ssh_private_key": ssh_key} if ssh_key else {})},
        "min_workers": len(workers),
        "max_workers": len(workers),
        "idle_timeout_minutes": 60 * 24,
        **_common(deployment, setup),
        "head_start_ray_commands": ["ray stop", head_command(machine, OWN_MACHINES)],
        "worker_start_ray_commands": ["ray stop", worker_command(machine, kept)],
    }


def cloud_cluster(
    deployment: Deployment, provider: Literal["aws", "gcp"], instance: str, head_instance: str, place: dict[str, str]
) -> dict[str, Any]:
    """Returns the content of the cluster file of ``ray up`` for machines that a cloud starts.

    `instance` and `head_instance` are the instance types of the workers and of the head, which runs no ranks. `place` contains
    ``region`` and ``availability_zone``, and for GCP ``project_id``; it is copied into the provider's section. Raises
    `LayoutError` for an invalid deployment name.
    """
    require_name(deployment.name)
    machine, types = deployment.machine, {"aws": _aws_type, "gcp": _gcp_type}[provider]
    return {
        "cluster_name": deployment.name,
        "max_workers": deployment.machines,
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
            **{
                f"worker-{group.pool}" if group.pool else "worker": {
                    **_worker_type(deployment.name, group),
                    "node_config": types(instance, 500),
                }
                for group in deployment.groups
            },
        },
        **_common(deployment, ()),
        "head_start_ray_commands": ["ray stop", head_command(machine)],
        "worker_start_ray_commands": ["ray stop", worker_command(machine)],
    }


def _worker_type(name: str, group: MachineGroup) -> dict[str, Any]:
    machine, workers = group.fleet.machine, group.fleet.machines
    kept = {POOL_LABEL: group.pool} if group.pool else {}
    return {
        "resources": {"CPU": machine.ray_cpus, **({"GPU": machine.slots} if machine.kind == "cuda" else {})},
        "labels": {"shardwright/layout": name, **kept},
        "min_workers": workers,
        "max_workers": workers,
    }


def _common(deployment: Deployment, setup: Sequence[str]) -> dict[str, Any]:
    return {
        "file_mounts": {TOKEN: TOKEN, **({} if setup else {SOURCE: "."})},
        "rsync_exclude": [".git", ".venv", "**/__pycache__"],
        "setup_commands": [f"chmod 600 {TOKEN}", *(setup or INSTALL), *_has_model(deployment.model)],
    }


def _has_model(model: str) -> list[str]:
    """Returns the command that checks for the model if it is a path, which must exist on every machine. A hub id needs no
    check: the ranks download the model into their user's cache."""
    if not model.startswith(("/", "~", ".")):
        return []
    home = "~/" if model.startswith("~/") else ""  # a shell expands it only outside quotes
    path, message = home + shlex.quote(model.removeprefix(home)), shlex.quote(f"the model {model} is missing on this machine")
    return [f"test -e {path} || (echo {message} >&2; exit 1)"]


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
