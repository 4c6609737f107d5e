"""Rendered files: Kubernetes' and Ray's own schemas, the operator's rules, and the rules that field reports taught."""

from __future__ import annotations

import random
import re
import shlex
import shutil
import subprocess
from functools import cache
from typing import Any

import kubernetes_validate
import pytest
import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import DeploymentSchema, HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from cluster.render.kuberay import Cloud, manifests, upgrade_strategy
from cluster.render.serve_file import Deployment
from placement import checkpoint_header
from placement.fleet import GIB, Machine, fleet
from placement.layout import Layout, LayoutError
from placement.model_spec import ModelSpec
from serve_app.catalog import DEFAULT_MODEL, resolve
from serve_app.render_command import RenderArgs, deployment_of, render, text_of
from serve_app.settings import parse_args
from tests.crd_schemas import faults
from tests.layout_draws import draw_layout
from tests.render_overlays import ROOT, overlays


@cache
def smollm2() -> ModelSpec:
    """The built-in model's header."""
    return checkpoint_header.read(resolve(DEFAULT_MODEL).path)


QUANTITY = {"Mi": 2**20, "Gi": 2**30}


def deployment(layout: str = "tp=2,pp=2", slots: int = 2, **more: Any) -> Deployment:
    args = RenderArgs.model_validate({"model": "smollm2-135m", "target": "kuberay", "slots": slots, **more})
    return deployment_of(args, Layout.parse(layout))


@pytest.mark.parametrize("path", overlays())
def test_the_files_that_ship_are_those_that_are_rendered(path: str) -> None:
    assert (ROOT / path).read_text() == overlays()[path]


@pytest.mark.parametrize("path", [path for path in overlays() if path.startswith("k8s")])
def test_the_manifests_that_ship_are_valid(path: str) -> None:
    for manifest in yaml.safe_load_all((ROOT / path).read_text()):
        check_manifest(manifest)


@pytest.mark.parametrize("seed", range(20))
def test_manifests_of_random_layouts_are_valid(seed: int) -> None:
    draw = random.Random(seed)
    layout = Layout(**{**draw_layout(draw, smollm2()).asked, "replicas": draw.choice((1, 2, 3))})
    slots, kind = layout.tp * draw.choice((1, 2, 4)), draw.choice(("cpu", "cuda"))
    made = deployment(str(layout), slots, device=kind, memory="32GiB", spare=draw.randint(0, 6), cpus=2 * slots)
    cloud = Cloud(image="i", spare=draw.randint(0, 6), gateway_class=draw.choice((None, "gw")))
    files = manifests(made, cloud)
    for documents in files.values():
        for manifest in yaml.safe_load_all(text_of(documents)):
            check_manifest(manifest)
    [service] = files["service.yaml"]
    config = service["spec"]["rayClusterConfig"]
    [group] = config["workerGroupSpecs"]
    pods = group["replicas"] * group["numOfHosts"]
    assert pods * (slots // layout.tp) >= layout.replicas * (layout.world // layout.tp)
    assert group["minReplicas"] == group["replicas"] <= group["maxReplicas"]
    assert layout.check(smollm2(), made.fleet.cluster) == []


@pytest.mark.parametrize("target", ["ray-up", "serve"])
@pytest.mark.parametrize("seed", range(5))
def test_ray_files_of_random_layouts_are_valid(seed: int, target: str) -> None:
    layout = draw_layout(random.Random(seed), smollm2())
    machines = deployment(str(layout), layout.tp).fleet.machines
    workers = [f"10.0.0.{at + 2}" for at in range(machines)]
    args = {"slots": layout.tp, "layout": str(layout), "target": target, "head": "10.0.0.1", "workers": workers}
    files = render(RenderArgs.model_validate({"model": "smollm2-135m", **args}))
    for name, [document] in files.items():
        again = yaml.safe_load(text_of([document]))
        check_serve_file(again) if name == "serve.yaml" else check_ray_up(again)


@pytest.mark.parametrize("name", ["local", "aws", "gcp"])
def test_the_clusters_that_ship_are_valid(name: str) -> None:
    config = yaml.safe_load((ROOT / f"cluster/configs/{name}.yaml").read_text())
    check_ray_up(config)
    assert "<" not in str(config), "every placeholder is filled"


def test_the_upgrade_follows_from_what_is_spare() -> None:
    assert upgrade_strategy(8, Cloud(image="i")) == {"type": "None"}
    assert upgrade_strategy(8, Cloud(image="i", spare=8)) == {"type": "NewCluster"}
    assert upgrade_strategy(8, Cloud(image="i", spare=4)) == {"type": "None"}
    step = upgrade_strategy(8, Cloud(image="i", spare=4, gateway_class="gw"))
    assert step["type"] == "NewClusterWithIncrementalUpgrade"
    assert step["clusterUpgradeOptions"]["maxSurgePercent"] == 50


def test_two_deployments_share_no_name() -> None:
    def names(name: str) -> set[str]:
        files = manifests(deployment(name=name), Cloud(image="i"))
        return {f"{each['kind']}/{each['metadata']['name']}" for documents in files.values() for each in documents}

    assert len(names("one")) > 5
    assert not names("one") & names("two")
    with pytest.raises(LayoutError, match="begin with a letter"):
        manifests(deployment(name="2b"), Cloud(image="i"))


def test_machines_are_counted_by_replicas_and_stages() -> None:
    machine = Machine(slots=8, kind="cuda", cpus=96, memory_bytes=64 * GIB)
    counts = {
        text: fleet(Layout.parse(text), machine)
        for text in ("tp=4,replicas=3", "tp=8,pp=2,replicas=2", "tp=4,pp=4", "cp=3,tp=8")
    }
    assert [(each.groups, each.hosts) for each in counts.values()] == [(2, 1), (2, 2), (1, 2), (1, 3)]
    with pytest.raises(LayoutError, match="tp=16 does not fit inside one machine of 8 slots"):
        fleet(Layout(tp=16), machine)


def test_too_few_machines_are_refused_with_their_number() -> None:
    args = {"model": "smollm2-135m", "layout": "tp=2,pp=2", "target": "ray-up", "slots": 2, "head": "h", "workers": ["w"]}
    with pytest.raises(LayoutError, match="needs 2 worker machines"):
        render(RenderArgs.model_validate(args))
    with pytest.raises(LayoutError, match="tp=10"):
        render(RenderArgs.model_validate({**args, "layout": "tp=10"}))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not here")
@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "k8s/overlays").iterdir()))
def test_kustomize_builds_every_overlay(name: str) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", f"k8s/overlays/{name}"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    objects = list(yaml.safe_load_all(done.stdout))
    assert {"Namespace", "RayService", "NetworkPolicy", "StatefulSet"} <= {each["kind"] for each in objects}
    assert {each["metadata"].get("namespace") for each in objects if each["kind"] != "Namespace"} == {"shardwright"}
    for manifest in objects:
        check_manifest(manifest)


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0, "replica"), 1, "replica"),
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0, "replicas"), "1", "integer"),
        (("spec", "rayClusterConfig", "headGroupSpec", "rayStartParams", "num-cpus"), 0, "string"),
        (("spec", "rayClusterConfig", "headGroupSpec", "template", "spec", "containers", 0, "name"), None, "name"),
        (("spec", "serveConfigV2"), {}, "string"),
    ],
)
def test_the_schemas_find_mistakes(path: tuple[Any, ...], value: Any, fault: str) -> None:
    [service] = manifests(deployment(), Cloud(image="i"))["service.yaml"]
    assert faults(service) == []
    at: Any = service
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    assert any(fault in each for each in faults(service))


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
        assert not {"labels", "redis-password", "redis-username"} & params.keys()
        assert not ({"num-cpus", "num-gpus", "memory", "resources"} & params.keys() and group.get("resources"))
        pod = group["template"]["spec"]
        assert pod.get("restartPolicy", "Never") == "Never"
        assert pod["containers"]
        assert not forbidden & {each["name"] for each in pod["containers"][0].get("env", [])}
        for value in group.get("labels", {}).values():
            assert re.fullmatch("[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", value)
    for group in workers:
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
    images = set()
    for group in (head, *workers):
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        images.add(container["image"])
        assert pod["securityContext"]["runAsNonRoot"]
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        shm = next(each for each in pod["volumes"] if each.get("emptyDir", {}).get("medium") == "Memory")
        size, memory = bytes_of(shm["emptyDir"]["sizeLimit"]), bytes_of(container["resources"]["limits"]["memory"])
        assert int(group["rayStartParams"]["object-store-memory"]) <= size < memory
        environment = {each["name"]: each["value"] for each in container["env"]}
        assert int(environment["RAY_gcs_rpc_server_reconnect_timeout_s"]) >= 300
    assert len(images) == 1
    args = yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"][0]["args"]
    assert args["entrance"] == "anywhere"
    assert "api_keys" not in args, "keys are a secret"


def check_serve_file(config: dict[str, Any]) -> None:
    """Serve's schema, which lets unknown keys pass, and the names of the keys; the application's arguments are its own."""
    ServeDeploySchema.model_validate(config)
    assert config.keys() <= ServeDeploySchema.model_fields.keys()
    assert config["http_options"].keys() <= HTTPOptionsSchema.model_fields.keys()
    [application] = config["applications"]
    assert application.keys() <= ServeApplicationSchema.model_fields.keys()
    for each in application["deployments"]:
        assert each.keys() <= DeploymentSchema.model_fields.keys()
    args = parse_args(application["args"])
    assert next(each for each in application["deployments"] if each["name"] == "Engine")["num_replicas"] == (
        Layout.parse(args.layout).replicas
    )


def check_ray_up(config: dict[str, Any]) -> None:
    """Ray's schema, and the mistakes that it does not see."""
    validate_config(prepare_config(config))
    for command in (*config["head_start_ray_commands"], *config["worker_start_ray_commands"]):
        words = shlex.split(command)
        assert "ulimit" in words or words == ["ray", "stop"]
        if "start" in words:
            assert {"RAY_AUTH_MODE=token", "RAY_USAGE_STATS_ENABLED=0"} <= set(words)
            assert all(re.fullmatch(r"-[-a-z]+(=.*)?", word) for word in words[words.index("start") + 1 :])
    head = " ".join(config["head_start_ray_commands"])
    assert "--num-cpus=0" in head
    if config["provider"]["type"] == "local":
        assert "RAY_enable_autoscaler_v2=0" in head, "it counts the head among the workers"
        assert config["min_workers"] == config["max_workers"] == len(config["provider"]["worker_ips"])
        return
    types = config["available_node_types"]
    worker = types["worker"]
    assert config["head_node_type"] == "head"
    assert worker["min_workers"] == worker["max_workers"] == config["max_workers"] > 0
    assert all(isinstance(amount, int) for amount in worker["resources"].values())


def bytes_of(quantity: str) -> int:
    return int(quantity[:-2]) * QUANTITY[quantity[-2:]]
