"""A service where memory is limited: it takes less by default, and says what would fit in place of what does not."""

from __future__ import annotations

import re

import pytest

from cluster.embedded import local
from placement.cost.memory import MemoryBudgetError
from placement.nodes.hardware import ClusterSpec
from placement.nodes.limits import MemoryLimit
from serve_app.deployment import pools
from serve_app.deployment.settings import ServeArgs, parse_args

GIB = 2**30


def limited(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(local, "memory_limit", lambda: MemoryLimit(num_bytes, "the limit of a test"))


def here(args: ServeArgs) -> ClusterSpec:
    return local.this_machine(pools.devices(args))


def served(**given: object) -> pools.Service:
    args = parse_args(given)
    return pools.service(args, "cpu", here(args))


def test_the_default_model_is_served_in_two_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 2 * GIB)
    settings = served().engine
    assert settings.kv_bytes is not None
    assert settings.kv_bytes < 2 * GIB - 538_000_000 - 1_200_000_000
    assert 1024 <= settings.max_model_len <= 8192
    limited(monkeypatch, 16 * GIB)
    assert served().engine.kv_bytes == GIB
    assert served().engine.max_model_len == 8192


@pytest.mark.parametrize(
    "given",
    [
        {"kv_bytes": "6GiB"},
        {"layout": "tp=4"},
        {"layout": "pp=3"},
        {"layout": "replicas=2"},
        {"host_cache": "1GiB"},
        {"max_model_len": 8192, "dtype": "float32"},
        {"prefill": "*1", "decode": "*1"},
    ],
)
def test_what_does_not_fit_two_gib_is_refused_and_what_is_named_instead_fits(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, object]
) -> None:
    limited(monkeypatch, 64 * GIB)
    served(**given)
    limited(monkeypatch, 2 * GIB)
    with pytest.raises(MemoryBudgetError) as refused:
        served(**given)
    named = re.search(r"This would fit: (.*)$", str(refused.value))
    if named is None:  # of the pools, each needs a rank of its own
        assert "prefill" in given
        assert str(refused.value).endswith("No layout of this model fits here")
        return
    for way in named[1].split(" or "):
        if way == "no host_cache":
            served(**given | {"host_cache": 0})
        else:
            name, _, value = way.replace("layout ", "layout=").partition("=")
            served(**given | {name: value})


def test_a_machine_without_room_for_the_service_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, GIB // 2)
    with pytest.raises(MemoryBudgetError, match=r"processes alone.*No layout of this model fits here"):
        served()
    assert "536,870,912 bytes (the limit of a test), of which Ray and the HTTP" in local.memory_text()


def test_embedded_nodes_share_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 8 * GIB)
    nodes = local.this_machine(0, local.EmbeddedShape(4, 2)).nodes
    assert len({node.memory_bytes for node in nodes}) == 1
    assert sum(node.memory_bytes or 0 for node in nodes) < 8 * GIB - 1_500_000_000


@pytest.mark.parametrize(("limit", "mib"), [(64 * GIB, 256), (2 * GIB, 128), (GIB // 2, 80)])
def test_the_object_store_is_small_where_the_memory_is(limit: int, mib: int) -> None:
    assert local.object_store_bytes(MemoryLimit(limit, "")) == mib * 2**20
