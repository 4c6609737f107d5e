"""What went wrong for others with files of this kind: upgrades that never end, names that clash, counts, quoting, memory."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.commands.render_command import RenderArgs, render
from serve_app.commands.render_text import text_of
from tests.support.render.checks import PLACEHOLDER, check_manifest, check_ray_up, start_line
from tests.support.render.crd_schemas import faults
from tests.support.render.overlays import ROOT, overlays

NEEDS = {"layout": {"layout": "tp=8,pp=2,replicas=4"}, "pools": {"prefill": "tp=8*4", "decode": "tp=8,pp=2*2"}}
"""Both need eight machines of eight slots."""
PLACES: dict[str, dict[str, Any]] = {
    "aws": {"provider": "aws", "instance": "m7i.2xlarge", "region": "us-west-2", "zone": "us-west-2a"},
    "gcp": {"provider": "gcp", "instance": "n2-standard-8", "region": "us-central1", "zone": "us-central1-a", "project": "p1"},
    "local": {"provider": "local", "head": "10.0.0.1", "workers": tuple(f"10.0.0.{at}" for at in range(2, 10))},
}


def files(kind: str, **more: Any) -> dict[str, list[dict[str, Any]]]:
    return render(RenderArgs.model_validate({"model": "smollm2-135m", "target": "kuberay", "slots": 8, **NEEDS[kind], **more}))


def service(kind: str, **more: Any) -> dict[str, Any]:
    return files(kind, **more)["service.yaml"][0]


@pytest.mark.parametrize("kind", NEEDS)
@pytest.mark.parametrize(
    ("have", "gateway", "strategy"),
    [
        (8, None, "None"),
        (8, "gw", "None"),
        (12, None, "None"),
        (12, "gw", "NewClusterWithIncrementalUpgrade"),
        (16, None, "NewCluster"),
    ],
)
def test_an_upgrade_asks_for_no_more_machines_than_there_are(kind: str, have: int, gateway: str | None, strategy: str) -> None:
    made = service(kind, spare=have - 8, gateway_class=gateway)
    check_manifest(made)
    groups = made["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert sum(group["replicas"] * group["numOfHosts"] for group in groups) == 8
    upgrade = made["spec"]["upgradeStrategy"]
    assert upgrade["type"] == strategy
    if "clusterUpgradeOptions" in upgrade:
        assert 8 * upgrade["clusterUpgradeOptions"]["maxSurgePercent"] <= 100 * (have - 8)


@pytest.mark.parametrize("kind", NEEDS)
def test_two_deployments_share_no_name(kind: str) -> None:
    one, two = files(kind, name="one"), files(kind, name="two")
    names = [{(each["kind"], each["metadata"]["name"]) for each in objects(made)} for made in (one, two)]
    assert min(len(found) for found in names) > 5
    assert not names[0] & names[1]
    used = [{name for each in objects(made) for name in references(each)} for made in (one, two)]
    assert used[0] >= {"one-state", "one-models", "one-api-keys"}
    assert not used[0] & used[1], "nor what they refer to"
    for made in (one, two):
        head = made["service.yaml"][0]["spec"]["rayClusterConfig"]["headGroupSpec"]
        assert not {"headService", "serveService"} & head.keys(), "the operator names its services after each cluster"
        assert "serveService" not in made["service.yaml"][0]["spec"]


@pytest.mark.parametrize("kind", NEEDS)
@pytest.mark.parametrize("place", PLACES)
def test_ray_up_starts_as_many_workers_as_are_needed(kind: str, place: str) -> None:
    [config] = files(kind, target="ray-up", **PLACES[place])["cluster.yaml"]
    config = yaml.safe_load(text_of([config]))
    check_ray_up(config)
    types = config.get("available_node_types", {"all": config}).values()
    assert sum(each["min_workers"] for each in types) == config["max_workers"] == 8


@pytest.mark.parametrize("kind", NEEDS)
def test_parameters_come_through_a_shell_as_they_are(kind: str) -> None:
    config = service(kind)["spec"]["rayClusterConfig"]
    for group in (config["headGroupSpec"], *config["workerGroupSpecs"]):
        words = shlex.split(start_line(group))
        assert words[:2] == ["ray", "start"]
        assert dict(word[2:].split("=") for word in words[2:]) == group["rayStartParams"]
    lost = {"rayStartParams": {"resources": json.dumps({"a": 1})}}
    assert '{"a": 1}' not in " ".join(shlex.split(start_line(lost))), "JSON would lose its quotes: none is written"


@pytest.mark.parametrize("path", ["/models/my model", "~/it's here"])
def test_names_of_models_come_through_a_shell(tmp_path: Path, path: str) -> None:
    [config] = files("layout", target="ray-up", model_path=path, **PLACES["local"])["cluster.yaml"]
    check = config["setup_commands"][-1]
    home = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", check], env=home, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (1, f"the model {path} is missing on this machine\n")
    if path.startswith("~"):
        (tmp_path / path.removeprefix("~/")).touch()
        assert subprocess.run(["bash", "-c", check], env=home, timeout=30).returncode == 0


@pytest.mark.parametrize("path", overlays())
def test_every_placeholder_is_filled(path: str) -> None:
    assert not PLACEHOLDER.search((ROOT / path).read_text())
    assert PLACEHOLDER.search("image: <your image>")


@pytest.mark.parametrize("kind", NEEDS)
def test_no_schema_lets_a_number_through_as_a_parameter(kind: str) -> None:
    made = service(kind)
    made["spec"]["rayClusterConfig"]["workerGroupSpecs"][-1]["rayStartParams"]["num-cpus"] = 8
    assert any("string" in each for each in faults(made))


def test_images_and_clusters_have_the_version_that_is_pinned() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    assert service("layout")["spec"]["rayClusterConfig"]["rayVersion"] == pins["ray"]
    installs = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if "-c constraints.txt" in line]
    assert len(installs) == 2
    assert all("[pools]" in line for line in installs), "and hold what pools need"


def objects(made: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [each for documents in made.values() for each in documents if "name" in each.get("metadata", {})]


def references(value: Any) -> set[str]:
    """Names of other objects in an object."""
    if isinstance(value, list):
        return {name for each in value for name in references(each)}
    if not isinstance(value, dict):
        return set()
    named = {value[key] for key in ("claimName", "secretName") if key in value}
    named |= {value["secretKeyRef"]["name"]} if "secretKeyRef" in value else set()
    named |= {value["redisAddress"].split(":")[0]} if "redisAddress" in value else set()
    return named.union(*(references(each) for each in value.values()))
