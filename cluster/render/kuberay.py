"""Kubernetes manifests for KubeRay 1.7: a RayService for any layout, with its storage, state, network policies and monitor.

One worker group contains all ranks, or there is one group per pool if the prefill and decode pools do not share a machine. A
replica of a worker group is a set of `Fleet.hosts` pods that are created, deleted and replaced together: one pipeline over
several machines, or one machine. All object names begin with the deployment's name, so that deployments do not collide.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from cluster.nodes.topology import POOL_LABEL
from cluster.render.legal import require_accelerator, require_image, require_name
from cluster.render.pods import KEYS_FILE, SERVICE_LABEL, head_pod, worker_pod
from cluster.render.serve_file import HTTP_PORT, Deployment, MachineGroup, serve_file
from placement.nodes.fleet import Machine

Manifest = dict[str, Any]


class Cloud(BaseModel):
    """The properties of the Kubernetes cluster. `spare` is the number of machines beyond those that the deployment needs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: str
    spare: int = Field(default=0, ge=0)
    gateway_class: str | None = None
    storage_class: str | None = None
    storage_gib: int = Field(default=200, ge=1)
    redis_image: str = "redis:7.4"


def manifests(deployment: Deployment, cloud: Cloud) -> dict[str, list[Manifest]]:
    """Returns the Kubernetes objects of a deployment by file name, such as ``service.yaml``, without the kustomization.

    Raises `LayoutError` for a name, image or accelerator label that Kubernetes would reject, and for an accelerator with CPU
    ranks.
    """
    require_name(deployment.name)
    require_image(cloud.image)
    for group in deployment.groups:
        require_accelerator(group.fleet.machine.accelerator, group.fleet.machine.kind)
    deployment = deployment.model_copy(update={"settings": {"api_keys_file": KEYS_FILE, **deployment.settings}})
    return {
        "service.yaml": [ray_service(deployment, cloud)],
        "state.yaml": _redis(deployment.name, cloud),
        "storage.yaml": [_models_claim(deployment.name, cloud)],
        "network.yaml": _policies(deployment.name),
        "monitor.yaml": [_pod_monitor(deployment.name)],
    }


def kustomization(name: str, files: list[str], base: str | None = None) -> Manifest:
    """Returns the kustomization that ``kubectl apply -k`` reads, with `files` (names in its folder) as resources.

    `name` is the deployment's name, with which all objects are labelled; `base` is the path of another kustomization to
    include. Two secrets must be created manually: see `docs/clusters.md`.
    """
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "labels": [{"pairs": {"app.kubernetes.io/part-of": name}, "includeSelectors": False}],
        "resources": [*([base] if base else []), *files],
    }


def ray_service(deployment: Deployment, cloud: Cloud) -> Manifest:
    """Returns the RayService object of a deployment: the Serve configuration, the Ray cluster with its pods, and the upgrade
    strategy. Checks nothing; see `manifests`."""
    text = yaml.safe_dump(serve_file(deployment, ingress_on_head=False), sort_keys=False)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": deployment.name, "annotations": {"ray.io/initializing-timeout": "2h"}},
        "spec": {
            "upgradeStrategy": upgrade_strategy(deployment.machines, cloud),
            "rayClusterDeletionDelaySeconds": 120,
            "excludeHeadPodFromServeSvc": True,
            "serveConfigV2": text,
            "rayClusterConfig": _cluster(deployment, cloud),
        },
    }


def upgrade_strategy(needed: int, cloud: Cloud) -> Manifest:
    """Returns the ``upgradeStrategy`` of the RayService of a deployment that needs `needed` machines.

    A new cluster is started beside the old one if the spare machines (``cloud.spare``) suffice. If they suffice for 1 % or more
    of the machines and ``cloud.gateway_class`` is set, so that traffic can be shifted, the upgrade is incremental. Otherwise
    there is none: the service must be deleted and applied again.
    """
    if cloud.spare >= needed:
        return {"type": "NewCluster"}
    percent = 100 * cloud.spare // needed
    if percent and cloud.gateway_class is not None:
        options = {"gatewayClassName": cloud.gateway_class, "maxSurgePercent": percent, "stepSizePercent": min(percent, 20)}
        return {"type": "NewClusterWithIncrementalUpgrade", "clusterUpgradeOptions": {**options, "intervalSeconds": 30}}
    return {"type": "None"}


def _cluster(deployment: Deployment, cloud: Cloud) -> Manifest:
    name = deployment.name
    claim, keys = f"{name}-models", f"{name}-api-keys"
    ray_version = version("ray")
    return {
        "rayVersion": ray_version,
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {
            "version": "v2",
            "idleTimeoutSeconds": 600,
            "resources": {"requests": {"cpu": "200m", "memory": "512Mi"}, "limits": {"cpu": "500m", "memory": "1Gi"}},
        },
        # No storage namespace is set, so the state of each cluster is stored under the cluster's UID.
        "gcsFaultToleranceOptions": {
            "redisAddress": f"{name}-state:6379",
            "redisPassword": {"valueFrom": {"secretKeyRef": {"name": f"{name}-state", "key": "password"}}},
        },
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "object-store-memory": str(2**30)},
            "template": head_pod(name, cloud.image, claim, keys),
        },
        "workerGroupSpecs": [
            _worker_group(group, worker_pod(name, cloud.image, group.fleet.machine, claim, keys)) for group in deployment.groups
        ],
    }


def _worker_group(group: MachineGroup, pod: Manifest) -> Manifest:
    """Returns a worker group. Its pool label excludes the replicas of other pools: see `cluster.replica.placement_group`."""
    fleet = group.fleet
    return {
        "groupName": group.name,
        "replicas": fleet.groups,
        "minReplicas": fleet.groups,
        "maxReplicas": fleet.groups,
        "numOfHosts": fleet.hosts,
        "labels": {"shardwright/group": group.name, **({POOL_LABEL: group.pool} if group.pool else {})},
        "rayStartParams": _worker_params(fleet.machine),
        "template": pod,
    }


def _worker_params(machine: Machine) -> dict[str, str]:
    """Returns the Ray start parameters, all strings. On a CPU machine, the Ray CPUs are the slots, not the cores."""
    slots = {"num-cpus": str(machine.slots)} if machine.kind == "cpu" else {}
    return {**slots, "object-store-memory": str(machine.object_store_bytes)}


def _redis(name: str, cloud: Cloud) -> list[Manifest]:
    """Returns the Redis objects in which the head stores its state, so that a new head continues where the old one ended."""
    label = {"app.kubernetes.io/name": f"{name}-state"}
    password = {"name": "REDIS_PASSWORD", "valueFrom": {"secretKeyRef": {"name": f"{name}-state", "key": "password"}}}
    container = {
        "name": "redis",
        "image": cloud.redis_image,
        "command": ["sh", "-c", 'exec redis-server --dir /data --appendonly yes --requirepass "$REDIS_PASSWORD"'],
        "env": [password],
        "ports": [{"name": "redis", "containerPort": 6379}],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    pod = {
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 999,
            "fsGroup": 999,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": f"{name}-state"},
            "spec": {"selector": label, "ports": [{"name": "redis", "port": 6379, "targetPort": "redis"}]},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {"name": f"{name}-state"},
            "spec": {
                "serviceName": f"{name}-state",
                "replicas": 1,
                "selector": {"matchLabels": label},
                "template": {"metadata": {"labels": label}, "spec": pod},
                "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": _claim("ReadWriteOnce", 1, cloud)}],
            },
        },
    ]


def _models_claim(name: str, cloud: Cloud) -> Manifest:
    """Returns the volume claim for the models, which all pods share."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": f"{name}-models"},
        "spec": _claim("ReadWriteMany", cloud.storage_gib, cloud),
    }


def _claim(mode: Literal["ReadWriteOnce", "ReadWriteMany"], gib: int, cloud: Cloud) -> Manifest:
    named = {"storageClassName": cloud.storage_class} if cloud.storage_class else {}
    return {"accessModes": [mode], **named, "resources": {"requests": {"storage": f"{gib}Gi"}}}


def _policies(name: str) -> list[Manifest]:
    """Returns the network policies.

    Pods of the service may connect to one another on any port, because the kernel chooses the ports of ranks and of UCX, which
    carries KV between pools (a TCP port per rank and interface). Other pods may reach HTTP and metrics, and the operator the
    dashboard.
    """
    pods = {"matchLabels": {SERVICE_LABEL: name}}
    anywhere: Manifest = {"namespaceSelector": {}}
    operator = {
        "namespaceSelector": {},
        "podSelector": {"matchLabels": {"app.kubernetes.io/component": "kuberay-operator"}},
    }
    state = {"matchLabels": {"app.kubernetes.io/name": f"{name}-state"}}
    return [
        _policy(
            f"{name}-ranks",
            pods,
            [
                {"from": [{"podSelector": pods}]},
                {"from": [anywhere], "ports": [{"port": HTTP_PORT}, {"port": 8080}]},
                {"from": [operator], "ports": [{"port": 8265}, {"port": 52365}, {"port": HTTP_PORT}]},
            ],
        ),
        _policy(f"{name}-state", state, [{"from": [{"podSelector": pods}], "ports": [{"port": 6379}]}]),
    ]


def _policy(name: str, pods: Manifest, ingress: list[Manifest]) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def _pod_monitor(name: str) -> Manifest:
    """Returns the monitor that scrapes Ray's metrics from every pod, and the engine's from every pod that serves HTTP."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": name},
        "spec": {
            "selector": {"matchLabels": {SERVICE_LABEL: name}},
            "podMetricsEndpoints": [{"port": "metrics"}, {"port": "serve", "path": "/metrics"}],
        },
    }
