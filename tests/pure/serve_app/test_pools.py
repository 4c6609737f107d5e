"""What ``--prefill`` and ``--decode`` come to, and what is wrong with them, before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from actors.wire.roles import Role
from placement.layout.layout import LayoutError
from placement.nodes.hardware import ClusterSpec, NodeSpec
from serve_app.deployment import pools
from serve_app.deployment.deployment_names import ENGINE, MIXED, PREFILL
from serve_app.deployment.settings import ServeArgs, parse_args

GIB = 2**30


def machine(slots: int) -> ClusterSpec:
    return ClusterSpec(nodes=(NodeSpec(name="here", slots=slots, memory_bytes=16 * GIB),))


def service(slots: int = 8, **arguments: Any) -> pools.Service:
    return pools.service(parse_args(arguments), "cpu", machine(slots))


def test_two_pools_have_layouts_and_replicas_of_their_own() -> None:
    found = service(prefill="tp=2*2", decode="pp=3")
    sizes = {name: (each.layout.world, each.layout.replicas, each.role) for name, each in found.by_name.items()}
    assert sizes == {ENGINE: (3, 1, Role.DECODE), PREFILL: (2, 2, Role.PREFILL)}
    assert found.devices == 7
    assert found.engine.max_model_len == found.by_name["Prefill"].max_model_len


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"mixed": "*3"}, [MIXED]),
        ({"mixed": "*3", "prefill": "tp=2"}, [MIXED, PREFILL]),
        ({"mixed": "*3", "decode": "tp=2"}, [ENGINE, MIXED]),
        ({"mixed": "*2", "decode": "tp=2", "prefill": "pp=2"}, [ENGINE, MIXED, PREFILL]),
    ],
)
def test_a_pool_may_do_both(arguments: dict[str, str], names: list[str]) -> None:
    """Requests go to the first."""
    found, roles = service(**arguments), {ENGINE: Role.DECODE, MIXED: Role.MIXED, PREFILL: Role.PREFILL}
    assert [(name, each.role) for name, each in found.by_name.items()] == [(name, roles[name]) for name in names]


def test_one_pool_is_as_it_was() -> None:
    found = service(layout="tp=2,replicas=2")
    assert (list(found.by_name), found.devices, found.engine.in_pool) == ([ENGINE], 4, False)


@pytest.mark.parametrize(("text", "devices"), [("tp=2*3", 6), (" tp=2 * 3 ", 6), ("*2", 2), ("1*2", None), ("tp=2*x", None)])
def test_the_text_of_a_pool(text: str, devices: int | None) -> None:
    args = ServeArgs(prefill=text, decode="tp=1")
    if devices is None:
        with pytest.raises(LayoutError):
            pools.devices(args)
    else:
        assert pools.devices(args) == devices + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prefill": "tp=2"}, "go together: give both"),
        ({"decode": "tp=2"}, "go together: give both"),
        ({"prefill": "tp=2", "decode": "tp=2", "layout": "pp=2"}, "layout='pp=2' is that of one pool"),
        ({"prefill": "tp=2,replicas=2*2", "decode": "tp=2"}, "is no pool"),
        ({"prefill": "tp=2*4", "decode": "tp=2"}, "are 10 ranks, but the cluster has 8 slots"),
        ({"prefill": "pp=99", "decode": "tp=2"}, "pp"),
        ({"mixed": "*2", "layout": "pp=2"}, r"with mixed='\*2' leave it out"),
        ({"mixed": "*2", "require_prefill": True}, r"require_prefill needs two pools, and mixed='\*2' is 1"),
        ({"layout": "tp=2", "require_prefill": True}, "require_prefill needs two pools, and layout='tp=2' is 1"),
    ],
)
def test_what_is_wrong_is_said(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        service(**arguments)


def test_ranks_of_both_pools_share_a_node() -> None:
    """Each gets as much KV as if it were alone only where there is room for that."""
    tight = ClusterSpec(nodes=(NodeSpec(name="here", slots=8, memory_bytes=6 * GIB),))
    alone = pools.service(parse_args({"layout": "tp=2"}), "cpu", tight)
    both = pools.service(parse_args({"prefill": "tp=4", "decode": "tp=4"}), "cpu", tight)
    assert both.engine.kv_bytes < alone.engine.kv_bytes
