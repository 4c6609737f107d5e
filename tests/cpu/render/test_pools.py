"""Files for two pools of unlike layouts: machines of their own, labels that keep them, and what cannot be."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.render.kuberay import Cloud, manifests
from cluster.render.start_commands import worker_command
from placement.layout.layout import LayoutError
from placement.model.spec import ModelError
from placement.nodes.fleet import GIB, Machine
from serve_app.commands.render_command import RenderArgs, deployment_of, render, run_render
from tests.support.models.tiny_models import tiny
from tests.support.render.checks import check_manifest, check_ray_up

POOLS = {"prefill": "tp=2*4", "decode": "tp=4,pp=2*1"}


def args(**more: Any) -> RenderArgs:
    return RenderArgs.model_validate({"model": "smollm2-135m", "target": "kuberay", "slots": 4, **POOLS, **more})


def test_pools_have_worker_groups_of_their_own() -> None:
    [service] = render(args())["service.yaml"]
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert {each["groupName"]: (each["replicas"], each["numOfHosts"]) for each in groups} == {
        "decode": (1, 2),
        "prefill": (2, 1),
    }
    assert {each["labels"]["shardwright/pool"] for each in groups} == {"decode", "prefill"}
    config = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]
    assert {name: config["args"][name] for name in POOLS} == POOLS
    assert "layout" not in config["args"]
    sizes = {each["name"]: (each["num_replicas"], each["max_replicas_per_node"]) for each in config["deployments"]}
    assert sizes == {"Ingress": (4, 1), "Engine": (1, 1), "Prefill": (4, 2)}
    spare = manifests(deployment_of(args()), Cloud(image="i", spare=4))["service.yaml"][0]
    assert spare["spec"]["upgradeStrategy"] == {"type": "NewCluster"}, "four machines are needed in all"


def test_pools_that_fit_into_one_machine_share_it() -> None:
    [service] = render(args(prefill="tp=2*2", decode="pp=2", slots=6))["service.yaml"]
    [group] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (group["groupName"], group["replicas"], group["numOfHosts"]) == ("ranks", 1, 1)
    assert "shardwright/pool" not in group["labels"]
    [*_, engine, prefill] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["deployments"]
    assert (engine["max_replicas_per_node"], prefill["max_replicas_per_node"]) == (1, 2)
    apart = deployment_of(args(prefill="tp=2*2", decode="pp=2", slots=5))
    assert [group.name for group in apart.groups] == ["decode", "prefill"]


def test_a_pool_may_have_other_machines() -> None:
    more = {"slots": 8, "device": "cuda", "cpus": 16, "accelerator": "H100", "prefill_machine": "slots=4, accelerator=L40S"}
    [service] = render(args(**{**more, "prefill": "tp=2*4", "decode": "tp=8"}))["service.yaml"]
    check_manifest(service)
    groups = {each["groupName"]: each for each in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]}
    pods = {name: each["template"]["spec"] for name, each in groups.items()}
    limits = {name: pod["containers"][0]["resources"]["limits"] for name, pod in pods.items()}
    sizes = {name: (each["nvidia.com/gpu"], each["cpu"]) for name, each in limits.items()}
    assert sizes == {"decode": ("8", "16"), "prefill": ("4", "16")}
    assert [pod["nodeSelector"]["nvidia.com/gpu.product"] for pod in pods.values()] == ["H100", "L40S"]
    assert (groups["prefill"]["replicas"], groups["decode"]["replicas"]) == (2, 1)
    apart = deployment_of(args(prefill="tp=1", decode="tp=1", decode_machine="memory=32GiB"))
    assert len(apart.groups) == 2, "one machine has room for both, but is not of both kinds"


def test_a_mixed_pool_has_machines_too() -> None:
    three = deployment_of(args(mixed="pp=2*2", mixed_machine="slots=2"))
    assert [(group.name, group.pool, group.fleet.machines) for group in three.groups] == [
        ("decode", "decode", 2),
        ("mixed", "mixed", 2),
        ("prefill", "prefill", 2),
    ]
    [service] = render(args(prefill="", decode="", mixed="tp=2*4"))["service.yaml"]
    check_manifest(service)
    [group] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (group["groupName"], group["replicas"]) == ("ranks", 2)


def test_what_pools_send_each_other_is_let_through() -> None:
    """UCX listens on ports of the kernel's choice, so no list of ports would do."""
    ranks = next(each for each in render(args())["network.yaml"] if each["metadata"]["name"].endswith("-ranks"))
    pods = ranks["spec"]["podSelector"]
    assert {"from": [{"podSelector": pods}]} in ranks["spec"]["ingress"]
    for group in render(args())["service.yaml"][0]["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        assert group["template"]["metadata"]["labels"].items() >= pods["matchLabels"].items()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"decode": ""}, "go together: give both"),
        ({"layout": "tp=2"}, "layout='tp=2' is that of one pool"),
        ({"decode": "tp=8"}, "tp=8 does not fit inside one machine of 4 slots"),
        ({"prefill": "tp=10"}, "tp=10 is more than the 9 query heads"),
        ({"slots": 40, "memory": "2GiB"}, "40 ranks .* 8 MiB .* 512 MiB .* give it 2,560 MiB"),
        ({"prefill_machine": "gpus=4"}, "'gpus=4' must be some of slots=..., cpus=..., memory=..., accelerator=..."),
        ({"prefill_machine": "slots=1"}, "tp=2 does not fit inside one machine of 1 slots"),
        ({"prefill_machine": "slots=2", "target": "ray-up"}, r"machines differ \(4 and 2 slots"),
        ({"prefill_machine": "slots=2", "spare": 3}, "--spare 3 counts machines of one kind"),
        ({"prefill": "", "decode": "", "decode_machine": "slots=8"}, "--decode-machine is of a pool that there is not"),
        ({"target": "ray-up", "head": "h", "workers": ("a", "b", "c")}, r"prefill=tp=2\*4 needs 4 worker machines of 4 slots"),
    ],
)
def test_what_cannot_be_is_refused_with_its_numbers(more: dict[str, Any], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        render(args(**more))


def test_a_model_whose_kv_cannot_be_handed_off_is_refused() -> None:
    with pytest.raises(ModelError, match="hand"):
        render(args(model=str(tiny("mimo_v2").folder), prefill="tp=1", decode="pp=2"))


def test_machines_of_the_cloud_have_a_type_for_each_pool() -> None:
    cloud = {"provider": "aws", "instance": "m7i.xlarge", "region": "r", "zone": "z"}
    config = render(args(target="ray-up", **cloud))["cluster.yaml"][0]
    check_ray_up(config)
    types = config["available_node_types"]
    assert {name: types[f"worker-{name}"]["min_workers"] for name in POOLS} == {"decode": 2, "prefill": 2}
    assert {types[f"worker-{name}"]["labels"]["shardwright/pool"] for name in POOLS} == set(POOLS)
    assert config["max_workers"] == 4


@pytest.mark.parametrize(
    ("addresses", "own", "labels"),
    [
        ("10.0.0.2", "", "shardwright/pool=decode"),
        ("172.17.0.1 10.0.0.3", "rack=r1,zone=z", "shardwright/pool=prefill,rack=r1,zone=z"),
        ("10.0.0.33", "rack=r1", "rack=r1"),
        ("10.0.0.33", "", ""),
    ],
)
def test_a_machine_of_ones_own_finds_its_pool(tmp_path: Path, addresses: str, own: str, labels: str) -> None:
    """The line that `ray up` gives to every worker, run by a shell that has another `ray`, `hostname` and `cat`."""
    machine = Machine(slots=4, cpus=4, memory_bytes=8 * GIB)
    line = worker_command(machine, {"decode": ["10.0.0.2"], "prefill": ["10.0.0.3", "there"]})
    stubs = {
        "hostname": f'[ "$1" = -I ] && echo "{addresses} " || echo here',
        "cat": f'printf "{own}\\n"',
        "ray": 'printf "%s\\n" "$@"',
    }
    for name, text in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RAY_HEAD_IP": "10.0.0.1"}
    done = subprocess.run(["bash", "-c", line], env=path, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    assert words[:2] == ["start", "--address=10.0.0.1:6379"]
    assert words[-1] == f"--labels={labels}"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"image": ""}, "image ''"),
        ({"image": "a b"}, "image 'a b' must be a name without spaces"),
        ({"device": "cuda", "accelerator": "NVIDIA L40S"}, "accelerator 'NVIDIA L40S' must be"),
        ({"device": "cuda", "accelerator": "L" * 64}, "at most 63"),
        ({"device": "cuda", "prefill_machine": "accelerator=-L40S"}, "accelerator '-L40S'"),
        ({"accelerator": "L40S"}, "accelerator 'L40S' is a kind of GPU, but device is cpu"),
        ({"prefill_machine": "slots=4,cpus=9,slots=2"}, "'slots=4,cpus=9,slots=2' has slots 2 times"),
        ({"name": "Demo"}, "name 'Demo' must be"),
        ({"decode": "tp=1*4", "memory": "1GiB"}, r"take 1,\d\d\d MiB, but memory=1024MiB"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        render(args(**more))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"workers": ["w1", "w2", "W1"]}, "--worker 'W1' is given as --worker already"),
        ({"workers": ["w1", "h"]}, "--worker 'h' is given as --head already"),
        ({"workers": ["w1", "10.0.0.2 10.0.0.3"]}, "--worker '10.0.0.2 10.0.0.3' must be a host name"),
        ({"workers": ["w1", "-oProxyCommand=x"]}, "--worker '-oProxyCommand=x' must be"),
        ({"head": "a b"}, "--head 'a b' must be"),
        ({"name": ""}, "name '' must be"),
        ({"name": "a_b"}, "name 'a_b' must be"),
        ({"name": "", "provider": "aws", "instance": "i", "region": "r", "zone": "z"}, "name '' must be"),
    ],
)
def test_what_ray_up_would_stumble_over_is_refused(more: dict[str, Any], said: str) -> None:
    asked = {"target": "ray-up", "head": "h", "workers": ["w1", "node-2.lan"], "prefill": "tp=4", "decode": "tp=4"}
    render(args(**asked))
    with pytest.raises(LayoutError, match=said):
        render(args(**{**asked, **more}))


def test_a_serve_file_asks_for_no_machines() -> None:
    [file] = render(args(target="serve", slots=1, cpus=1, device="cuda", memory="1GiB"))["serve.yaml"]
    assert file["applications"][0]["args"]["decode"] == POOLS["decode"]
    with pytest.raises(LayoutError, match="tp=2 does not fit inside one machine of 1 slots"):
        render(args(target="serve", prefill_machine="slots=1"))


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/shardwright")):
        with pytest.raises(SystemExit) as ended:
            run_render(args(out=out))
        assert ended.value.code == 2
        assert capsys.readouterr().err.startswith(f"error: --out {out}: ")
    assert (tmp_path / "file").read_text() == "mine"
