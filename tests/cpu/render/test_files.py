"""Rendered files: Kubernetes' and Ray's own schemas, the operator's rules, and the rules that field reports taught."""

from __future__ import annotations

import random
import shutil
import subprocess
from functools import cache
from typing import Any

import pytest
import yaml

from cluster.render.kuberay import Cloud, manifests
from cluster.render.serve_file import Deployment
from placement.checkpoint import header as checkpoint_header
from placement.layout.layout import Layout, LayoutError
from placement.legality.check import check
from placement.model.spec import ModelSpec
from placement.nodes.assignment import assign_bundles
from placement.nodes.fleet import GIB, Machine, fleet
from serve_app.commands.render_command import RenderArgs, deployment_of, render
from serve_app.commands.render_text import text_of
from serve_app.deployment.catalog import DEFAULT_MODEL, resolve
from serve_app.deployment.pools import layouts
from serve_app.deployment.settings import ServeArgs
from tests.support.layout_draws import draw_layout
from tests.support.render.checks import check_manifest, check_ray_up, check_serve_file
from tests.support.render.crd_schemas import faults
from tests.support.render.overlays import ROOT, overlays


@cache
def smollm2() -> ModelSpec:
    """The built-in model's header."""
    return checkpoint_header.read(resolve(DEFAULT_MODEL).path)


def deployment(layout: str = "tp=2,pp=2", slots: int = 2, **more: Any) -> Deployment:
    args = {"model": "smollm2-135m", "target": "kuberay", "slots": slots, "layout": layout, **more}
    return deployment_of(RenderArgs.model_validate(args))


KINDS = (("layout",), ("layout",), ("prefill", "decode"), ("prefill", "decode"), ("mixed",), ("prefill", "decode", "mixed"))


def draw_pools(draw: random.Random) -> dict[str, str]:
    """A layout and its replicas, or several of unlike layouts, as arguments of `render`."""
    drawn = {name: (draw_layout(draw, smollm2()), draw.choice((1, 2, 3))) for name in draw.choice(KINDS)}
    if "layout" in drawn:
        layout, replicas = drawn["layout"]
        return {"layout": str(layout.model_copy(update={"replicas": replicas}))}
    return {name: f"{layout}*{replicas}" for name, (layout, replicas) in drawn.items()}


def check_room(made: Deployment) -> None:
    """Every replica finds room on the machines that are kept for its pool, one after the other."""
    for group in made.groups:
        cluster = group.fleet.cluster
        free = [node.slots for node in cluster.nodes]
        for layout in (pool.layout for pool in made.pools if group.pool in (None, pool.argument)):
            for _ in range(layout.replicas):
                assignment = assign_bundles(layout, smollm2(), cluster, free)
                assert assignment is not None, f"{layout} finds {free} free on {group}"
                for node in assignment.nodes:
                    free[node] -= layout.tp


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
    asked = draw_pools(draw)
    tp = max(layout.tp for layout in layouts(ServeArgs(**asked)).values())
    slots, kind = tp * draw.choice((1, 2, 4)), draw.choice(("cpu", "cuda"))
    made = deployment(**{"layout": "", **asked}, slots=slots, device=kind, memory="32GiB", cpus=2 * slots)
    cloud = Cloud(image="i", spare=draw.randint(0, 6), gateway_class=draw.choice((None, "gw")))
    files = manifests(made, cloud)
    for documents in files.values():
        for manifest in yaml.safe_load_all(text_of(documents)):
            check_manifest(manifest)
    [service] = files["service.yaml"]
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert [(each["replicas"], each["numOfHosts"]) for each in groups] == [
        (each.fleet.groups, each.fleet.hosts) for each in made.groups
    ]
    check_room(made)
    for pool in made.pools:
        assert check(pool.layout, smollm2(), pool.fleet.cluster) == []


def test_every_kind_is_among_the_random_ones() -> None:
    kinds = [tuple(draw_pools(random.Random(seed))) for seed in range(20)]
    assert set(kinds) == set(KINDS)


@pytest.mark.parametrize("target", ["ray-up", "serve"])
@pytest.mark.parametrize("seed", range(5))
def test_ray_files_of_random_layouts_are_valid(seed: int, target: str) -> None:
    asked = draw_pools(random.Random(seed))
    slots = max(layout.tp for layout in layouts(ServeArgs(**asked)).values())
    machines = deployment(**{"layout": "", **asked}, slots=slots).machines
    workers = [f"10.0.0.{at + 2}" for at in range(machines)]
    args = {"slots": slots, **asked, "target": target, "head": "10.0.0.1", "workers": workers}
    files = render(RenderArgs.model_validate({"model": "smollm2-135m", **args}))
    for name, [document] in files.items():
        again = yaml.safe_load(text_of([document]))
        check_serve_file(again) if name == "serve.yaml" else check_ray_up(again)


@pytest.mark.parametrize("name", ["local", "aws", "gcp"])
def test_the_clusters_that_ship_are_valid(name: str) -> None:
    config = yaml.safe_load((ROOT / f"cluster/configs/{name}.yaml").read_text())
    check_ray_up(config)


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


def gpus(**more: Any) -> dict[str, Any]:
    return {"model": "smollm2-135m", "layout": "tp=3,replicas=2", "device": "cuda", "slots": 8, **more}


@pytest.mark.parametrize("target", ["ray-up", "kuberay"])
def test_a_gpu_without_a_cpu_is_refused(target: str) -> None:
    """Its bundle asks for both: Ray would wait for such a machine for ever."""
    with pytest.raises(LayoutError, match=r"8 GPUs has cpus=2: give it cpus=8 or more, or 2 slots"):
        deployment_of(RenderArgs.model_validate(gpus(target=target, cpus=2)))
    unlike = {
        "target": "kuberay",
        "layout": "",
        "prefill": "tp=1*1",
        "decode": "tp=1*1",
        "cpus": 8,
        "prefill_machine": "slots=9",
    }
    with pytest.raises(LayoutError, match=r"9 GPUs has cpus=8"):
        deployment_of(RenderArgs.model_validate(gpus(**unlike)))
    assert deployment(device="cpu", slots=8, cpus=2).machine.ray_cpus == 8, "slots of CPU ranks may share cores"


def test_ray_up_tells_one_number_of_cpus() -> None:
    place = {"target": "ray-up", "provider": "aws", "instance": "p5", "region": "r", "zone": "z"}
    for asked, cpus in (({"cpus": 96}, 96), ({"device": "cpu", "cpus": 96}, 8)):
        [config] = render(RenderArgs.model_validate(gpus(**place, **asked)))["cluster.yaml"]
        assert config["available_node_types"]["worker"]["resources"]["CPU"] == cpus
        assert f"--num-cpus={cpus} " in config["worker_start_ray_commands"][1]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("target", ["ray-up", "kuberay", "serve"])
def test_too_many_machines_are_refused_before_they_are_listed(target: str) -> None:
    args = {"model": "smollm2-135m", "target": target, "slots": 8, "layout": "replicas=100000000"}
    with pytest.raises(LayoutError, match=r"12,500,000 machines, more than 10,000: use replicas=80000 or fewer"):
        render(RenderArgs.model_validate(args))
    assert deployment(layout="replicas=80000", slots=8).machines == 10_000
