"""The memory and CPUs that a process may use, read from invented ``/proc`` and ``/sys`` trees, and from a real cgroup."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.nodes.limits import cpu_limit, memory_limit

GIB = 2**30
CPUS = len(os.sched_getaffinity(0))
UNLIMITED_V1 = str(2**63 - 4096)


@dataclass(frozen=True)
class Tree:
    """An invented machine below a folder."""

    root: Path

    def write(self, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    @property
    def memory(self) -> int:
        return memory_limit(self.root).num_bytes


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    made = Tree(tmp_path)
    made.write({"proc/meminfo": f"MemFree: 1 kB\nMemTotal:       {16 * GIB // 1024} kB\nSwapTotal: 99 kB\n"})
    return made


def v2(tree: Tree, own: str, files: Mapping[str, str], mounted: str = "/") -> None:
    """A machine with the unified hierarchy, which holds `files`."""
    mount = f"30 24 0:26 {mounted} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
    tree.write({"proc/self/cgroup": f"0::{own}\n", "proc/self/mountinfo": mount})
    tree.write({f"sys/fs/cgroup/{name}": text for name, text in files.items()})


def v1(tree: Tree, own: str, files: Mapping[str, str], mounted: str = "/") -> None:
    """A machine with a hierarchy for each controller (and an empty unified one beside them), which hold `files`."""
    mount = "3{0} 24 0:3{0} {1} /sys/fs/cgroup/{2} rw,relatime - cgroup cgroup rw,{2}\n"
    unified = "39 24 0:39 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    mounts = "".join(mount.format(at, mounted, name) for at, name in enumerate(("memory", "cpu,cpuacct", "pids"), 1))
    paths = f"4:memory:{own}\n3:cpu,cpuacct:{own}\n2:pids:/\n0::/\n"
    tree.write({"proc/self/cgroup": paths, "proc/self/mountinfo": mounts + unified})
    tree.write({f"sys/fs/cgroup/{name}": text for name, text in files.items()})


def test_a_machine_without_cgroups_has_all_its_memory(tree: Tree) -> None:
    assert tree.memory == 16 * GIB
    assert cpu_limit(tree.root) == CPUS
    assert memory_limit(tree.root).source == "the machine's memory"


def test_a_machine_whose_files_cannot_be_read_has_what_the_system_says(tmp_path: Path) -> None:
    assert memory_limit(tmp_path).num_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("at", ["", "pod/", "pod/box/"])
def test_the_smallest_limit_on_the_path_to_the_root_counts(tree: Tree, at: str) -> None:
    files = {"memory.max": "max\n", "pod/memory.max": "max\n", "pod/box/memory.max": f"{8 * GIB}\n", "memory.high": "max\n"}
    v2(tree, "/pod/box", {**files, "pod/other/memory.max": "4096\n"} | {f"{at}memory.max": f"{2 * GIB}\n"})
    assert tree.memory == 2 * GIB
    assert memory_limit(tree.root).source == f"the limit {tree.root}/sys/fs/cgroup/{at}memory.max of its cgroup"


@pytest.mark.parametrize("at", ["memory/", "memory/pod/", "memory/pod/box/"])
def test_version_1_is_read_along_the_path_too(tree: Tree, at: str) -> None:
    files = {f"memory/{above}memory.limit_in_bytes": UNLIMITED_V1 for above in ("", "pod/", "pod/box/")}
    v1(tree, "/pod/box", files | {f"{at}memory.limit_in_bytes": str(3 * GIB)})
    assert tree.memory == 3 * GIB


def test_version_1_counts_limits_above_what_is_mounted(tree: Tree) -> None:
    stat = f"cache 1\nhierarchical_memory_limit {5 * GIB}\nhierarchical_memsw_limit 1\n"
    v1(tree, "/docker/ab", {"memory/memory.limit_in_bytes": UNLIMITED_V1, "memory/memory.stat": stat}, mounted="/docker/ab")
    assert tree.memory == 5 * GIB


@pytest.mark.parametrize(
    ("own", "mounted", "inside"),
    [
        ("/", "/", ""),  # its own namespace
        ("/kube/pod/box", "/kube/pod/box", ""),  # the host's names, and a mount of its own part only
        ("/kube/pod/box", "/kube/pod", "box/"),
        ("/../other", "/", ""),  # names of another namespace
        ("/somewhere/else", "/kube/pod", ""),
    ],
)
def test_a_container_finds_its_own_limit(tree: Tree, own: str, mounted: str, inside: str) -> None:
    v2(tree, own, {f"{inside}memory.max": str(GIB), f"{inside}cpu.max": "100000 100000"}, mounted)
    assert tree.memory == GIB
    assert cpu_limit(tree.root) == 1


def test_memory_beyond_the_throttled_limit_does_not_count(tree: Tree) -> None:
    v2(tree, "/a", {"a/memory.max": str(4 * GIB), "a/memory.high": str(3 * GIB)})
    assert tree.memory == 3 * GIB


@pytest.mark.parametrize("limit", ["max", UNLIMITED_V1, str(64 * GIB), "", "nonsense", "-1"])
def test_no_limit_or_one_above_the_machine_changes_nothing(tree: Tree, limit: str) -> None:
    v2(tree, "/a", {"a/memory.max": limit, "a/cpu.max": "max 100000"})
    assert tree.memory == 16 * GIB
    assert cpu_limit(tree.root) == CPUS


def test_a_mount_with_a_space_in_its_path_is_found(tree: Tree) -> None:
    tree.write({"proc/self/cgroup": "0::/a\n", "mnt/my groups/a/memory.max": str(GIB)})
    tree.write({"proc/self/mountinfo": "30 24 0:26 / /mnt/my\\040groups rw - cgroup2 cgroup2 rw\n"})
    assert tree.memory == GIB


@pytest.mark.parametrize("text", ["", "x", "0::", "0:", "::::", "0::/a\n30 24", "30 24 0:26 / /sys/fs/cgroup rw - cgroup2"])
def test_files_cut_short_are_no_limit(tree: Tree, text: str) -> None:
    v2(tree, "/a", {"a/memory.max": "max"})
    tree.write({"proc/self/cgroup": text, "proc/self/mountinfo": text, "sys/fs/cgroup/a/cpu.max": text})
    assert tree.memory == 16 * GIB
    assert cpu_limit(tree.root) == CPUS


@pytest.mark.parametrize(
    ("quota", "period", "cpus"), [(150000, 100000, 1), (50000, 100000, 1), (25000, 50000, 1), (-1, 100000, CPUS)]
)
def test_a_quota_of_cpus_is_rounded_down_to_at_least_one(tree: Tree, quota: int, period: int, cpus: int) -> None:
    v1(tree, "/a", {"cpu,cpuacct/a/cpu.cfs_quota_us": str(quota), "cpu,cpuacct/a/cpu.cfs_period_us": str(period)})
    assert cpu_limit(tree.root) == cpus
    v2(tree, "/a", {"a/cpu.max": f"{quota if quota > 0 else 'max'} {period}"})
    assert cpu_limit(tree.root) == cpus


def test_the_affinity_of_the_process_limits_its_cpus() -> None:
    one = str(min(os.sched_getaffinity(0)))
    child = f"import os; from placement.nodes.limits import cpu_limit; os.sched_setaffinity(0, [{one}]); print(cpu_limit())"
    assert subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout == "1\n"


@given(st.lists(st.none() | st.integers(1, 32 * GIB), min_size=1, max_size=6), st.booleans())
def test_any_nesting_gives_the_smallest(limits: list[int | None], is_v2: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree, name = Tree(Path(folder)), "memory.max" if is_v2 else "memory.limit_in_bytes"
        tree.write({"proc/meminfo": f"MemTotal: {16 * GIB // 1024} kB\n"})
        files, path = {}, "" if is_v2 else "memory/"
        for depth, limit in enumerate(limits):
            files[f"{path}{name}"] = str(limit) if limit is not None else "max" if is_v2 else UNLIMITED_V1
            path += f"g{depth}/"
        own = "/" + "/".join(f"g{depth}" for depth in range(len(limits) - 1))
        (v2 if is_v2 else v1)(tree, own, files)
        assert tree.memory == min([16 * GIB, *(limit for limit in limits if limit is not None)])


# A real cgroup


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory cgroup below this process's own, of whichever version the machine has."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    by_name = {names: path for _, names, path in (line.split(":", 2) for line in lines)}
    is_v1 = Path("/sys/fs/cgroup/memory").is_dir()
    folder = Path("/sys/fs/cgroup/memory" if is_v1 else "/sys/fs/cgroup") / by_name.get("memory" if is_v1 else "", "/").lstrip(
        "/"
    )
    made = folder / f"shardwright-test-{os.getpid()}"
    try:
        made.mkdir()
        (made / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(GIB))
    except OSError as error:
        if made.is_dir():
            made.rmdir()
        pytest.skip(f"needs the right to create a cgroup with a memory limit: {error}")
    yield made
    made.rmdir()


def test_a_process_in_a_real_cgroup_sees_its_limit(group: Path) -> None:
    child = "from placement.nodes.limits import memory_limit; print(memory_limit().num_bytes, memory_limit().source)"
    command = f"echo $$ > '{group}/cgroup.procs' && exec '{sys.executable}' -c '{child}'"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert re.fullmatch(rf"{GIB} the limit {re.escape(str(group))}/memory\.\w+ of its cgroup\n", done.stdout)
