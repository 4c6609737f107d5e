"""``explain --cluster``: the placement and what they cost, to read and as JSON, and a cluster that does not hold the layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from placement.nodes.hardware import ClusterSpec, NodeSpec
from placement.nodes.links import Link, NodeLink
from serve_app.commands.cli import app

RUN = CliRunner()


@pytest.fixture
def slow(tmp_path: Path) -> str:
    link = Link(bytes_per_s=25e6, latency_s=1e-3, source="measured")
    nodes = tuple(NodeSpec(name=name, slots=2, rack=f"r{name}") for name in "ab")
    path = tmp_path / "cluster.json"
    path.write_text(ClusterSpec(nodes=nodes, links=(NodeLink(a="a", b="b", link=link),)).model_dump_json(exclude_none=True))
    return str(path)


def explained(*args: str, status: int = 0) -> str:
    done = RUN.invoke(app, ["explain", "--layout", *args])
    assert done.exit_code == status, done.output
    return done.output


def test_a_layout_that_crosses_a_slow_link_says_so_and_what_it_costs(slow: str) -> None:
    text = explained("tp=2,pp=2", "--cluster", slow)
    assert "a: ranks 0-1" in text
    assert "b: ranks 2-3" in text
    assert "stage boundary (pp) crosses a -> b" in text
    assert "(slow link, measured 200 Mbit/s)" in text
    [replica] = json.loads(explained("tp=2,pp=2", "--cluster", slow, "--json"))["seats"]
    assert replica["node_of_rank"] == ["a", "a", "b", "b"]
    assert replica["crossings"]["far_hops"] == 2
    assert all(each["slow"] for each in replica["links"])
    assert replica["busiest_link_seconds"] > 1e-3


def test_a_layout_that_crosses_nothing_says_nothing(slow: str) -> None:
    text = explained("tp=2,replicas=2", "--cluster", slow)
    assert "replica 1, ranks 0-1" in text
    assert "crosses" not in text


def test_a_layout_that_does_not_fit_is_refused_with_the_numbers(slow: str) -> None:
    assert "tp=3 does not fit inside one node" in explained("tp=3", "--cluster", slow, status=1)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_cluster_file_of_another_shell(slow: str, encoding: str) -> None:
    text = explained("tp=2", "--cluster", slow)
    Path(slow).write_text(Path(slow).read_text(), encoding=encoding)
    assert explained("tp=2", "--cluster", slow) == text


def test_a_file_that_is_no_cluster_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("{}")
    done = RUN.invoke(app, ["explain", "--cluster", str(tmp_path / "x")])
    assert "shardwright cluster --json" in str(done.exception)
