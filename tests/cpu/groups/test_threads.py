"""Groups whose ranks are threads of this process: the thread backend, one rank alone, and how gloo groups are made."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import pytest
import torch

from actors.groups.distributed.rendezvous import join_store, serve_store
from actors.groups.distributed.torch_group import TorchGroup
from actors.groups.group import Group, GroupError
from actors.groups.solo import SoloGroup
from actors.groups.thread import run_ranks, thread_groups
from actors.rank.group_backends import choose_backend, connect_group
from placement.cost import wire

_spec = importlib.util.spec_from_file_location("groups_battery", Path(__file__).with_name("battery.py"))
assert _spec is not None
assert _spec.loader is not None
battery = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(battery)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_threads_give_exactly_the_plain_result(size: int) -> None:
    for rank, results in enumerate(run_ranks(thread_groups(size, "tp"), battery.run)):
        for label, expected in battery.expected(size, rank).items():
            assert torch.equal(results[label], expected), f"{label} on rank {rank} of {size}"


def test_threads_count_what_gloo_counts() -> None:
    _store, port = serve_store("counters")

    def over_gloo(group: Group) -> object:
        torch_group = TorchGroup(join_store("counters", "127.0.0.1", port), "counters", group.rank, group.size, "tp")
        return battery.run(torch_group)["counters"]

    by_threads = [results["counters"] for results in run_ranks(thread_groups(3, "tp"), battery.run)]
    assert run_ranks(thread_groups(3, "tp"), over_gloo) == by_threads


def test_wire_bytes_of_uneven_rows() -> None:
    def body(group: Group) -> dict[str, int]:
        rows = [0, 5, 1]
        group.all_reduce(torch.ones(7))
        group.all_gather(torch.ones(rows[group.rank], 2), rows)
        group.reduce_scatter(torch.ones(6, 2), rows)
        group.all_to_all(torch.ones(3, 2), [1, 1, 1], [1, 1, 1])
        return dict(group.sent_bytes)

    first, second, _ = run_ranks(thread_groups(3, "tp"), body)
    assert first == {"all_reduce": 4 * 28 // 3, "all_gather": 0, "reduce_scatter": 48, "all_to_all": 16}
    assert second == {"all_reduce": 4 * 28 // 3, "all_gather": 80, "reduce_scatter": 8, "all_to_all": 16}
    assert wire.all_reduce_bytes(28, 3) == 37


def test_one_rank_alone_gets_its_argument_back_and_sends_nothing() -> None:
    group = SoloGroup("tp")
    x = torch.ones(3, 2)
    assert group.all_reduce(x) is x
    assert group.all_gather(x, [3]) is x
    assert group.reduce_scatter(x, [3]) is x
    assert group.all_to_all(x, [3], [3]) is x
    group.barrier()
    assert sum(group.sent_bytes.values()) == 0
    assert group.calls["all_reduce"] == 1
    with pytest.raises(GroupError, match="send on axis tp"):
        group.send(x, 0)
    with pytest.raises(GroupError, match="recv on axis tp"):
        group.recv((3, 2), torch.float32, 1)


def test_backends_of_size_one_agree_with_the_solo_group() -> None:
    (group,) = thread_groups(1, "tp")
    for label, expected in battery.expected(1, 0).items():
        if "ring" not in label:
            act = next(act for name, act, _ in battery.cases(1) if name == label)
            assert torch.equal(act(group), expected), label


def test_rows_that_do_not_add_up_are_refused_with_the_numbers() -> None:
    group = SoloGroup("ep")
    with pytest.raises(GroupError, match=r"all_gather on axis ep.*sizes=\[4\] but this rank has 3 rows"):
        group.all_gather(torch.ones(3), [4])
    with pytest.raises(GroupError, match=r"reduce_scatter.*3 rows"):
        group.reduce_scatter(torch.ones(3), [2])
    with pytest.raises(GroupError, match=r"all_to_all.*send=\[2\]"):
        group.all_to_all(torch.ones(3), [2], [2])


def test_a_rank_that_never_comes_is_named_after_the_deadline() -> None:
    first, _ = thread_groups(2, "pp", timeout_s=0.05)
    with pytest.raises(GroupError, match=r"all_reduce on axis pp, rank 0 of 2: waited 0\.\d s for ranks \[1\]"):
        first.all_reduce(torch.ones(1))


def test_a_rank_that_raises_ends_the_wait_of_the_others_at_once() -> None:
    seen: dict[int, GroupError] = {}

    def body(group: Group) -> None:
        if group.rank == 1:
            raise ValueError("broken rank")
        try:
            group.recv((1,), torch.float32, 1) if group.rank else group.barrier()
        except GroupError as error:
            seen[group.rank] = error
            raise

    began = time.monotonic()
    with pytest.raises(ValueError, match="broken rank"):
        run_ranks(thread_groups(3, "tp"), body)
    assert time.monotonic() - began < 5.0
    assert "rank 1 has closed the group" in str(seen[0])
    assert "recv on axis tp, rank 2" in str(seen[2])


def test_ranks_that_do_different_things_are_told_so() -> None:
    def body(group: Group) -> None:
        group.all_reduce(torch.ones(2)) if group.rank else group.all_reduce(torch.ones(3))

    with pytest.raises(GroupError, match=r"rank . called .*all_reduce.*this rank"):
        run_ranks(thread_groups(2, "tp"), body)


def test_a_rank_with_the_address_of_another_engine_is_refused() -> None:
    _store, port = serve_store("blue")
    with pytest.raises(GroupError, match="belongs to engine 'blue', not to 'green'"):
        join_store("green", "127.0.0.1", port, timeout_s=5)


def test_a_store_that_is_not_there_is_an_error_within_the_deadline() -> None:
    with pytest.raises(GroupError, match=r"no rendezvous store at 127\.0\.0\.1:1 "):
        join_store("blue", "127.0.0.1", 1, timeout_s=0.2)


def test_gloo_names_the_ranks_that_do_not_join() -> None:
    store, _ = serve_store("alone")
    with pytest.raises(GroupError, match=r"tp group 'alone', rank 0 of 3: waited .* for ranks \[1, 2\] to join"):
        TorchGroup(store, "alone", 0, 3, "tp", timeout_s=0.2)


def test_a_new_gloo_generation_works_after_a_failed_one() -> None:
    _store, port = serve_store("reborn")
    before: dict[int, str] = {}

    def body(group: Group) -> list[float]:
        store = join_store("reborn", "127.0.0.1", port)
        old = TorchGroup(store, "1", group.rank, 2, "tp", timeout_s=0.5)
        if group.rank == 0:
            with pytest.raises(GroupError) as caught:
                old.recv((1,), torch.float32, 1)
            before[0] = str(caught.value)
        group.barrier()
        old.close()
        new = TorchGroup(store, "2", group.rank, 2, "tp")
        return new.all_reduce(torch.ones(1)).tolist()

    assert run_ranks(thread_groups(2, "tp"), body) == [[2.0], [2.0]]
    assert "recv with rank 1 on axis tp, rank 0 of 2, failed after 0." in before[0]


def test_the_backend_follows_from_device_and_hosts() -> None:
    assert choose_backend("cuda", 1) == "nccl"
    assert choose_backend("cpu", 2) == "gloo"
    assert choose_backend("cpu", 1) in ("shared_memory", "gloo")
    store, _ = serve_store("solo")
    assert isinstance(connect_group("gloo", store, "solo", "tp", [3], 3), SoloGroup)
