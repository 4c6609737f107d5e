"""What every rendered file must be: Kubernetes' and Ray's own schemas, the operator's rules, and those field reports taught."""

from __future__ import annotations

import re
import shlex
from typing import Any

import kubernetes_validate
import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import DeploymentSchema, HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from cluster.nodes.topology import POOL_LABEL, POOLS
from placement.nodes.fleet import TRANSFER_BYTES
from serve_app.deployment.deployment_names import POOL_OF
from serve_app.deployment.pools import layouts
from serve_app.deployment.settings import parse_args
from tests.support.render.crd_schemas import faults

QUANTITY = {"Mi": 2**20, "Gi": 2**30}
PLACEHOLDER = re.compile(r"<[^>]*>|\{\{|\$\{|CHANGE_?ME|TODO|XXX|\byour-", re.IGNORECASE)
"""In a file that a person is to use as it is."""


def check_manifest(manifest: dict[str, Any]) -> None:
    """One Kubernetes object against its schema, as far as it is known here, and what the schema does not say."""
    if manifest["kind"] == "Kustomization":
        return
    if manifest["apiVersion"] == "ray.io/v1":
        check_operator_rules(manifest)
        check_our_rules(manifest)
        check_serve_file(yaml.safe_load(manifest["spec"]["serveConfigV2"]))
        assert faults(manifest) == []
        return
    check_core(manifest)


def check_core(manifest: dict[str, Any]) -> None:
    """Kubernetes' own kinds; PodMonitor is of an operator whose schema is not here."""
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", manifest["metadata"]["name"])
    if manifest["kind"] == "PodMonitor":
        assert set(manifest["spec"]) == {"selector", "podMetricsEndpoints"}
        return
    kubernetes_validate.validate(manifest, "1.31", strict=True)


def check_operator_rules(manifest: dict[str, Any]) -> None:
    """What KubeRay refuses though its schema allows it."""
    name, spec = manifest["metadata"]["name"], manifest["spec"]
    config = spec["rayClusterConfig"]
    head, workers = config["headGroupSpec"], config["workerGroupSpecs"]
    assert len(name) <= 47
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert "name" not in head.get("headService", {}).get("metadata", {})
    assert tuple(map(int, config["rayVersion"].split("."))) >= (2, 52, 0)
    assert config["rayVersion"] == ray.__version__
    strategy = spec["upgradeStrategy"]
    assert strategy["type"] in ("NewCluster", "NewClusterWithIncrementalUpgrade", "None")
    if strategy["type"] == "NewClusterWithIncrementalUpgrade":
        options = strategy["clusterUpgradeOptions"]
        assert config["enableInTreeAutoscaling"]
        assert 0 < options["stepSizePercent"] <= options["maxSurgePercent"] <= 100
        assert options["intervalSeconds"] > 0
        assert options["gatewayClassName"]
    forbidden = {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME", "RAY_enable_autoscaler_v2"}
    for group in (head, *workers):
        params = group["rayStartParams"]
        assert all(isinstance(value, str) for value in params.values())
        assert shlex.split(start_line(group)) == ["ray", "start", *(f"--{name}={value}" for name, value in params.items())]
        assert not {"labels", "redis-password", "redis-username"} & params.keys()
        assert not ({"num-cpus", "num-gpus", "memory", "resources"} & params.keys() and group.get("resources"))
        pod = group["template"]["spec"]
        assert pod.get("restartPolicy", "Never") == "Never"
        assert pod["containers"]
        assert not forbidden & {each["name"] for each in pod["containers"][0].get("env", [])}
        for value in group.get("labels", {}).values():
            assert re.fullmatch("[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", value)
    assert len({group["groupName"] for group in workers}) == len(workers)
    for group in workers:
        assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", group["groupName"])
        assert group["numOfHosts"] >= 1
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def check_our_rules(manifest: dict[str, Any]) -> None:
    """A head without model work, state outside it, shared memory that fits, nobody root, one image."""
    config = manifest["spec"]["rayClusterConfig"]
    head, workers = config["headGroupSpec"], config["workerGroupSpecs"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    state = config["gcsFaultToleranceOptions"]
    assert state["redisAddress"].startswith(manifest["metadata"]["name"])
    assert "externalStorageNamespace" not in state, "the operator's own is unique for each cluster"
    assert config["authOptions"] == {"mode": "token"}
    args = yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"][0]["args"]
    images = set()
    for group in (head, *workers):
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        images.add(container["image"])
        assert pod["securityContext"]["runAsNonRoot"]
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        shm = next(each for each in pod["volumes"] if each.get("emptyDir", {}).get("medium") == "Memory")
        size, memory = bytes_of(shm["emptyDir"]["sizeLimit"]), bytes_of(container["resources"]["limits"]["memory"])
        store = int(group["rayStartParams"]["object-store-memory"])
        assert store <= size < memory
        if set(POOLS) & set(args) and group is not head:
            assert size - store >= num_slots(group) * TRANSFER_BYTES, "ranks hand off KV through shared memory too"
        environment = {each["name"]: each["value"] for each in container["env"]}
        assert int(environment["RAY_gcs_rpc_server_reconnect_timeout_s"]) >= 300
    assert len(images) == 1, "head and workers run one version of Ray"
    kept = {group["groupName"]: group["labels"].get(POOL_LABEL) for group in workers}
    assert kept == ({"ranks": None} if len(workers) == 1 else {pool: pool for pool in POOLS if pool in args})
    assert set(POOL_OF.values()) == set(POOLS)
    assert args["ingress_node"] == "anywhere"
    assert "api_keys" not in args, "keys are a secret"


def start_line(group: dict[str, Any]) -> str:
    """What the operator makes of the parameters, and gives to a shell: it quotes nothing."""
    return " ".join(["ray start", *(f"--{name}={value}" for name, value in group["rayStartParams"].items())])


def num_slots(group: dict[str, Any]) -> int:
    """Ranks that a pod of the group runs."""
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    return int(limits.get("nvidia.com/gpu") or group["rayStartParams"]["num-cpus"])


def check_serve_file(config: dict[str, Any]) -> None:
    """Serve's schema, which lets unknown keys pass, and the names of the keys; the application's arguments are its own."""
    ServeDeploySchema.model_validate(config)
    assert config.keys() <= ServeDeploySchema.model_fields.keys()
    assert config["http_options"].keys() <= HTTPOptionsSchema.model_fields.keys()
    [application] = config["applications"]
    assert application.keys() <= ServeApplicationSchema.model_fields.keys()
    for each in application["deployments"]:
        assert each.keys() <= DeploymentSchema.model_fields.keys()
    asked = layouts(parse_args(application["args"]))
    found = {each["name"]: each["num_replicas"] for each in application["deployments"]}
    found.pop("Ingress")
    assert found == {name: layout.replicas for name, layout in asked.items()}


def check_ray_up(config: dict[str, Any]) -> None:
    """Ray's schema, and the mistakes that it does not see."""
    validate_config(prepare_config(config))
    for command in (*config["head_start_ray_commands"], *config["worker_start_ray_commands"]):
        words = shlex.split(command)
        assert "ulimit" in words or words == ["ray", "stop"]
        if "start" in words:
            assert {"RAY_AUTH_MODE=token", "RAY_USAGE_STATS_ENABLED=0"} <= set(words)
            assert all(re.fullmatch(r"-[-a-z]+(=.*)?", word) for word in words[words.index("start") + 1 :])
    assert not {"head_setup_commands", "worker_setup_commands"} & config.keys(), "head and workers install one version of Ray"
    head = " ".join(config["head_start_ray_commands"])
    assert "--num-cpus=0" in head
    if config["provider"]["type"] == "local":
        assert "RAY_enable_autoscaler_v2=0" in head, "it counts the head among the workers"
        assert config["min_workers"] == config["max_workers"] == len(config["provider"]["worker_ips"])
        return
    types = dict(config["available_node_types"])
    assert types.pop(config["head_node_type"])["max_workers"] == 0, "the head is none of the workers, so none is one short"
    for worker in types.values():
        assert worker["min_workers"] == worker["max_workers"] > 0
        assert all(isinstance(amount, int) for amount in worker["resources"].values())
    assert config["max_workers"] == sum(worker["max_workers"] for worker in types.values())


def bytes_of(quantity: str) -> int:
    return int(quantity[:-2]) * QUANTITY[quantity[-2:]]
