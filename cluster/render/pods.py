"""Pod templates for KubeRay: non-root containers with shared memory, model cache, API keys, and their machine's limits."""

from __future__ import annotations

from typing import Any

from cluster.render.serve_file import HTTP_PORT
from placement.nodes.fleet import GIB, Machine

MODELS = "/models"
KEYS_FOLDER = "/etc/shardwright"
KEYS_FILE = f"{KEYS_FOLDER}/api-keys"
_SHM = "/dev/shm"
_USER = 1000

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "serve_app.openai.proxy.in_front",
    # Workers keep running while the head is down, and wait this long for it to come back.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    "HF_HOME": f"{MODELS}/huggingface",
}

HEAD_MACHINE = {"cpu": "2", "memory": "8Gi"}


SERVICE_LABEL = "shardwright/service"
"""The label with the service that a pod belongs to. Network policies and monitors select pods by it."""


def head_pod(name: str, image: str, claim: str, keys: str) -> dict[str, Any]:
    """Returns the KubeRay pod template of the head node, which runs no ranks and can serve HTTP.

    `name` is the deployment's name, with which the pod is labelled; `image` is the container image; `claim` is the name of the
    volume claim with the models, and `keys` that of the secret with the API keys, which need not exist.
    """
    container = {
        "name": "ray-head",
        "image": image,
        "env": _env(_ENVIRONMENT),
        "ports": [
            {"name": "gcs-server", "containerPort": 6379},
            {"name": "dashboard", "containerPort": 8265},
            {"name": "client", "containerPort": 10001},
            {"name": "serve", "containerPort": HTTP_PORT},
            {"name": "metrics", "containerPort": 8080},
        ],
        "resources": {"requests": HEAD_MACHINE, "limits": HEAD_MACHINE},
        "securityContext": _CONFINED,
        "volumeMounts": _mounts(),
    }
    spec = {"securityContext": _not_root(), "containers": [container], "volumes": _volumes(2 * GIB, claim, keys)}
    return {"metadata": {"labels": {SERVICE_LABEL: name}}, "spec": spec}


def worker_pod(name: str, image: str, machine: Machine, claim: str, keys: str) -> dict[str, Any]:
    """Returns the KubeRay pod template of a worker node, which runs ranks, with the CPUs, memory, GPUs and accelerator of
    `machine`.

    `name` is the deployment's name, with which the pod is labelled; `image` is the container image; `claim` is the name of the
    volume claim with the models, and `keys` that of the secret with the API keys, which need not exist.
    """
    amounts = {"cpu": str(machine.cpus), "memory": f"{machine.memory_bytes // 2**20}Mi"}
    limits = amounts | ({"nvidia.com/gpu": str(machine.slots)} if machine.kind == "cuda" else {})
    container = {
        "name": "ray-worker",
        "image": image,
        "env": _env(_ENVIRONMENT),
        "ports": [{"name": "serve", "containerPort": HTTP_PORT}, {"name": "metrics", "containerPort": 8080}],
        "resources": {"requests": limits, "limits": limits},
        "securityContext": _CONFINED,
        "volumeMounts": _mounts(),
        # Ranks end by themselves when their raylet ends; a step in flight can still return its result.
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", "ray stop"]}}},
    }
    spec: dict[str, Any] = {
        "securityContext": _not_root(),
        "terminationGracePeriodSeconds": 60,
        "containers": [container],
        "volumes": _volumes(machine.shm_bytes, claim, keys),
    }
    if machine.kind == "cuda":
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    if machine.accelerator is not None:
        spec["nodeSelector"] = {"nvidia.com/gpu.product": machine.accelerator}
    return {"metadata": {"labels": {SERVICE_LABEL: name}}, "spec": spec}


_CONFINED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _not_root() -> dict[str, Any]:
    return {"runAsNonRoot": True, "runAsUser": _USER, "fsGroup": _USER, "seccompProfile": {"type": "RuntimeDefault"}}


def _env(values: dict[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _mounts() -> list[dict[str, Any]]:
    return [
        {"name": "shm", "mountPath": _SHM},
        {"name": "models", "mountPath": MODELS},
        {"name": "keys", "mountPath": KEYS_FOLDER, "readOnly": True},
    ]


def _volumes(shm_bytes: int, claim: str, keys: str) -> list[dict[str, Any]]:
    """Returns the volumes of a pod. Shared memory counts against the pod's memory limit. The operator provides Ray's folder."""
    return [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shm_bytes // 2**20}Mi"}},
        {"name": "models", "persistentVolumeClaim": {"claimName": claim}},
        {"name": "keys", "secret": {"secretName": keys, "optional": True}},
    ]
