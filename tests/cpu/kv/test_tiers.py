"""Blocks in host memory and in a directory: bounds, who goes first, damage, restarts, several processes, unlike layouts."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actors.engine.kv.prefix import PrefixChain
from actors.kv_offload import directory
from actors.kv_offload.assemble import assemble, covers
from actors.kv_offload.background import BackgroundWriter
from actors.kv_offload.block_part import BlockPart, KVFormat
from actors.kv_offload.directory import DirectoryTier
from actors.kv_offload.file_format import decode, encode, file_bytes
from actors.kv_offload.host import HostTier
from actors.kv_offload.key_layout import OWN_FOLDER, DirectoryError
from actors.kv_offload.ledger import Ledger
from actors.kv_offload.rank_blocks import RankBlocks
from actors.kv_offload.tiers import Tiers
from placement.layout.layout import Layout
from placement.ownership.handoff import Side
from tests.support.kv.transfer_cases import Case, model

ROOT = Path(__file__).resolve().parents[3]
WHOLE = BlockPart(range(4), range(3), range(16))
KV_FORMAT = KVFormat.of(model("gqa"), "a" * 64, "float32", 16)
NAMES = [KV_FORMAT.name(bytes([number]) * 32) for number in range(40)]
PAYLOAD = bytes(range(256)) * (KV_FORMAT.num_bytes(WHOLE) // 256)


def part_of(size: int) -> BlockPart:
    """A part told apart from others by its number of positions."""
    return BlockPart(range(1), range(1), range(size))


# Names


def test_a_block_has_another_name_in_another_format() -> None:
    other = [
        KVFormat.of(model("gqa"), "b" * 64, "float32", 16),
        KVFormat.of(model("gqa"), "a" * 64, "bfloat16", 16),
        KVFormat.of(model("gqa"), "a" * 64, "float32", 32),
        KVFormat.of(model("mla"), "a" * 64, "float32", 16),
    ]
    assert len({kv_format.name(b"h" * 32) for kv_format in (KV_FORMAT, *other)}) == 5
    assert KV_FORMAT.name(b"h" * 32) == KV_FORMAT.name(b"h" * 32) != KV_FORMAT.name(b"i" * 32)


ranges = st.tuples(st.integers(0, 6), st.integers(1, 6)).map(lambda ends: range(ends[0], sum(ends)))
parts = st.builds(BlockPart, ranges, ranges, ranges)


@settings(deadline=None)
@given(parts)
def test_a_part_is_read_back_from_its_text(part: BlockPart) -> None:
    assert BlockPart.parse(str(part)) == part
    assert BlockPart.parse(f".new-{part}") is None


# Putting together


def _true_bytes(kv_format: KVFormat, part: BlockPart) -> bytes:
    """Bytes that say where in the whole block they are."""
    values = [
        bytes([layer * 5 + plane * 3 + head, position]) * (kv_format.num_bytes(part) // part.size // kv_format.planes // 2)
        for layer in part.layers
        for plane in range(kv_format.planes)
        for head in part.kv_heads
        for position in part.positions
    ]
    return b"".join(values)


@settings(deadline=None, max_examples=200)
@given(parts, st.lists(parts, max_size=6))
def test_a_part_is_put_together_exactly_where_others_cover_it(wanted: BlockPart, there: list[BlockPart]) -> None:
    kv_format = KVFormat("m", "bfloat16", 2, 4, 16)
    units = {
        (layer, head, position)
        for part in there
        for layer in part.layers
        for head in part.kv_heads
        for position in part.positions
    }
    covered = all(
        (layer, head, position) in units for layer in wanted.layers for head in wanted.kv_heads for position in wanted.positions
    )
    found = assemble(kv_format, wanted, there, lambda part: _true_bytes(kv_format, part))
    assert covers(wanted, there) == covered
    assert found == (_true_bytes(kv_format, wanted) if covered else None)
    assert assemble(kv_format, wanted, there, lambda part: None) is None
    assert assemble(kv_format, wanted, there, lambda part: b"short") is None


# Host memory


def test_host_memory_is_bounded_and_gives_up_what_was_used_longest_ago() -> None:
    host = HostTier(300)
    for name in NAMES[:3]:
        assert host.store(name, WHOLE, bytes(100))
    assert host.load(NAMES[0], WHOLE) == bytes(100)
    assert host.store(NAMES[3], WHOLE, bytes(150))
    assert [bool(host.parts(name)) for name in NAMES[:4]] == [True, False, False, True]
    assert (host.num_bytes, host.num_evicted) == (250, 2)


def test_a_pinned_block_stays_and_what_then_has_no_room_is_turned_away() -> None:
    host = HostTier(200)
    host.pin([NAMES[0], NAMES[1], NAMES[1]])
    assert host.store(NAMES[0], WHOLE, bytes(100))
    assert host.store(NAMES[1], WHOLE, bytes(100))
    assert not host.store(NAMES[2], WHOLE, bytes(1))
    host.unpin([NAMES[1]])
    assert not host.store(NAMES[2], WHOLE, bytes(1))
    host.unpin([NAMES[1]])
    assert host.store(NAMES[2], WHOLE, bytes(1))
    assert host.load(NAMES[0], WHOLE) is not None
    assert host.load(NAMES[1], WHOLE) is None


@settings(deadline=None)
@example([(0, 1, 61), (0, 2, 120), (0, 3, 120)])
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3), st.integers(0, 120)), max_size=60))
def test_host_memory_counts_what_it_holds_and_never_more_than_its_limit(stores: list[tuple[int, int, int]]) -> None:
    """A part is refused only where its own block would no longer fit: a block gives up none of its own parts."""
    host = HostTier(300)
    for block, positions, size in stores:
        part = part_of(positions)
        rest = [host.load(NAMES[block], each) for each in host.parts(NAMES[block]) if each != part]
        before = host.load(NAMES[block], part)
        fits = size + sum(len(data) for data in rest if data is not None) <= 300
        assert host.store(NAMES[block], part, bytes(size)) == fits
        assert host.load(NAMES[block], part) == (bytes(size) if fits else before)
        held = [host.load(name, each) for name in NAMES[:10] for each in host.parts(name)]
        assert host.num_bytes == sum(len(data) for data in held if data is not None) <= 300
    assert not host.store(NAMES[0], WHOLE, bytes(301))


# Files


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_any_flipped_bit_and_any_other_length_is_a_miss(data: st.DataObject) -> None:
    payload = data.draw(st.binary(max_size=200))
    content = encode(NAMES[0], WHOLE, payload)
    assert decode(content, NAMES[0], WHOLE) == payload
    assert len(content) == file_bytes(NAMES[0], WHOLE, len(payload))
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    flipped = bytearray(content)
    flipped[bit // 8] ^= 1 << bit % 8
    assert decode(bytes(flipped), NAMES[0], WHOLE) is None
    assert decode(content[: data.draw(st.integers(0, len(content) - 1))], NAMES[0], WHOLE) is None
    assert decode(content + b"x", NAMES[0], WHOLE) is None
    assert decode(content, NAMES[1], WHOLE) is None
    assert decode(content, NAMES[0], part_of(1)) is None


def test_a_damaged_file_is_a_miss_once_and_then_written_again(tmp_path: Path) -> None:
    tier = DirectoryTier(tmp_path, 1 << 20)
    assert tier.store(NAMES[0], WHOLE, PAYLOAD)
    [path] = tmp_path.glob("*/??/*/*")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    assert tier.parts(NAMES[0]) == [WHOLE]
    assert tier.load(NAMES[0], WHOLE) is None
    assert (tier.num_damaged, tier.parts(NAMES[0]), tier.num_bytes) == (1, [], 0)
    assert tier.store(NAMES[0], WHOLE, PAYLOAD)
    assert tier.load(NAMES[0], WHOLE) == PAYLOAD


def test_another_blocks_file_under_a_blocks_name_is_a_miss(tmp_path: Path) -> None:
    tier = DirectoryTier(tmp_path, 1 << 20)
    tier.store(NAMES[0], WHOLE, PAYLOAD)
    tier.store(NAMES[1], WHOLE, bytes(len(PAYLOAD)))
    paths = {path.parent.name: path for path in tmp_path.glob("*/??/*/*")}
    paths[NAMES[1]].replace(paths[NAMES[0]])
    assert tier.load(NAMES[0], WHOLE) is None


def test_a_directory_is_bounded_and_gives_up_what_was_used_longest_ago(tmp_path: Path) -> None:
    size = file_bytes(NAMES[0], WHOLE, 1000)
    tier = DirectoryTier(tmp_path, 10 * size)
    tier.pin([NAMES[1]])
    for at, name in enumerate(NAMES[:10]):
        assert tier.store(name, WHOLE, bytes(1000))
        os.utime(tmp_path / OWN_FOLDER / name[:2] / name / str(WHOLE), (at, at))
    assert tier.load(NAMES[0], WHOLE) is not None
    assert tier.store(NAMES[3], WHOLE, bytes(1000))
    assert all(tier.store(name, WHOLE, bytes(1000)) for name in NAMES[10:12])
    there = [bool(tier.parts(name)) for name in NAMES[:12]]
    assert there == [True, True, False, True, False, *[True] * 7], "0 and 3 were used again, 1 is pinned"
    assert tier.num_bytes == sum(path.stat().st_size for path in tmp_path.glob("*/??/*/*")) <= 10 * size
    assert not tier.store(NAMES[12], WHOLE, bytes(11 * size))


def test_a_restart_finds_everything_and_counts_it_anew(tmp_path: Path) -> None:
    tier = DirectoryTier(tmp_path, 1 << 20)
    tier.store(NAMES[0], WHOLE, PAYLOAD)
    total = tier.num_bytes
    tier.close()
    (tmp_path / OWN_FOLDER / ".ledger").write_text("7")
    again = DirectoryTier(tmp_path, 1 << 20)
    assert again.num_bytes == total
    assert again.load(NAMES[0], WHOLE) == PAYLOAD


def test_a_persons_own_files_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    theirs = [
        tmp_path / "en/docs/thesis.txt",
        tmp_path / OWN_FOLDER / "en/docs/thesis.txt",
        tmp_path / OWN_FOLDER / NAMES[0][:2] / NAMES[0] / "note",
        tmp_path / OWN_FOLDER / NAMES[0][:2] / NAMES[0] / "folder" / "note",
        tmp_path / OWN_FOLDER / NAMES[1][:2] / "docs" / str(WHOLE),
        tmp_path / OWN_FOLDER / NAMES[2][:2] / NAMES[2] / str(part_of(3)) / "note",
    ]
    for path in theirs:
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(500))
        os.utime(path, (1, 1))
    tier = DirectoryTier(tmp_path, 2 * file_bytes(NAMES[0], WHOLE, 1000))
    assert tier.num_bytes == 0
    assert all(tier.store(name, WHOLE, bytes(1000)) for name in NAMES[:6])
    assert all(path.read_bytes() == bytes(500) for path in theirs)


def test_what_lies_in_the_way_of_a_block_is_a_failed_store(tmp_path: Path) -> None:
    tier = DirectoryTier(tmp_path, 1 << 20)
    (tmp_path / OWN_FOLDER / NAMES[0][:2]).write_bytes(b"theirs")
    assert not tier.store(NAMES[0], WHOLE, PAYLOAD)
    other = next(name for name in NAMES if name[:2] != NAMES[0][:2])
    assert tier.store(other, WHOLE, PAYLOAD)


@pytest.mark.parametrize("text", ["garbage", "-7", "", "\x00" * 40])
def test_a_ledger_without_a_number_is_put_right(tmp_path: Path, text: str) -> None:
    tier = DirectoryTier(tmp_path, 1 << 20)
    assert tier.store(NAMES[0], WHOLE, PAYLOAD)
    total = tier.num_bytes
    (tmp_path / OWN_FOLDER / ".ledger").write_text(text)
    assert tier.num_bytes == total
    assert tier.store(NAMES[1], WHOLE, PAYLOAD)
    assert int((tmp_path / OWN_FOLDER / ".ledger").read_text()[:32]) == 2 * total


def test_a_ledger_that_is_never_let_go_costs_stores_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = DirectoryTier(tmp_path, 1 << 20)
    assert first.store(NAMES[0], WHOLE, PAYLOAD)
    [path] = tmp_path.glob("*/??/*/*")
    monkeypatch.setattr(Ledger.locked.__wrapped__, "__defaults__", (0.1,))
    with (tmp_path / OWN_FOLDER / ".ledger").open("r+") as ledger:
        fcntl.flock(ledger, fcntl.LOCK_EX)
        tier = DirectoryTier(tmp_path, 1 << 20)
        writer = BackgroundWriter(tier, 1 << 20)
        writer.offer(NAMES[1], WHOLE, PAYLOAD)
        writer.offer(NAMES[2], WHOLE, PAYLOAD)
        writer.flush(30)
        assert writer.num_failed == 2
        assert caplog.text.count("was locked by another process") == 1
        assert tier.load(NAMES[0], WHOLE) == PAYLOAD
        path.write_bytes(bytes(path.stat().st_size))
        assert tier.load(NAMES[0], WHOLE) is None
    assert tier.store(NAMES[0], WHOLE, PAYLOAD), "the damaged file is removed, once the ledger can be had"
    assert tier.load(NAMES[0], WHOLE) == PAYLOAD
    assert tier.num_bytes == path.stat().st_size
    writer.close(30)


def test_a_disk_smaller_than_the_limit_gives_up_what_was_used_longest_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = file_bytes(NAMES[0], WHOLE, 1000)
    tier, write = DirectoryTier(tmp_path, 1 << 30), Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if sum(each.stat().st_size for each in tmp_path.glob("*/??/*/*")) + len(content) > 5 * size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    for at, name in enumerate(NAMES[:5]):
        assert tier.store(name, WHOLE, bytes(1000))
        os.utime(tmp_path / OWN_FOLDER / name[:2] / name / str(WHOLE), (at, at))
    assert tier.store(NAMES[5], WHOLE, bytes(1000))
    assert [bool(tier.parts(name)) for name in NAMES[:6]] == [False, *[True] * 5]
    assert tier.num_bytes == 5 * size
    assert not tier.store(NAMES[6], WHOLE, bytes(6 * size)), "tried again once"


def test_a_directory_that_cannot_be_one_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"theirs")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/blocks")):
        with pytest.raises(DirectoryError, match=f"disk_cache '{path}': .+; give a directory"):
            DirectoryTier(path, 1 << 20)


_WRITE_ON = """
import sys
from pathlib import Path
import tests.support.kv.tier_writer as t
tier = t.DirectoryTier(Path(sys.argv[1]), 1 << 30)
print("ready", flush=True)
number = 0
while True:
    tier.store(t.KV_FORMAT.name(number.to_bytes(32, "little")), t.WHOLE, t.PAYLOAD)
    number += 1
    print(number, flush=True)
"""


@pytest.mark.parametrize("after", [1, 7, 40])
def test_a_killed_writer_leaves_only_whole_files(tmp_path: Path, after: int) -> None:
    code = _WRITE_ON
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert writer.stdout is not None
        for line in writer.stdout:
            if line.strip() == str(after):
                break
        writer.send_signal(signal.SIGKILL)
    finally:
        writer.kill()
        writer.wait()
    tier = DirectoryTier(tmp_path, 1 << 30)
    there = [number for number in range(after + 1000) if tier.parts(KV_FORMAT.name(number.to_bytes(32, "little")))]
    assert there[:after] == list(range(after))
    assert all(tier.load(KV_FORMAT.name(number.to_bytes(32, "little")), WHOLE) == PAYLOAD for number in there)
    assert tier.num_damaged == 0


_KILLED_AT = """
import os, sys
from pathlib import Path
import tests.support.kv.tier_writer as t
tier = t.DirectoryTier(Path(sys.argv[1]), 1 << 30)

def half(path, content):
    with path.open("wb") as file:
        file.write(content[: len(content) // 2])
        file.flush()
        os.kill(os.getpid(), 9)

if sys.argv[2] == "half a file":
    Path.write_bytes = half
else:
    os.rename = lambda *paths: os.kill(os.getpid(), 9)
tier.store(t.KV_FORMAT.name(bytes(32)), t.WHOLE, t.PAYLOAD)
"""


@pytest.mark.parametrize("moment", ["half a file", "a whole file without its name"])
def test_a_writer_killed_in_a_write_leaves_nothing_under_the_blocks_name(tmp_path: Path, moment: str) -> None:
    done = subprocess.run([sys.executable, "-c", _KILLED_AT, str(tmp_path), moment], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    name, tier = KV_FORMAT.name(bytes(32)), DirectoryTier(tmp_path, 1 << 30)
    assert (tier.parts(name), tier.load(name, WHOLE), tier.num_damaged) == ([], None, 0)
    assert tier.store(name, WHOLE, PAYLOAD)
    assert tier.load(name, WHOLE) == PAYLOAD


def test_what_a_killed_writer_left_behind_is_removed_once_it_is_old(tmp_path: Path) -> None:
    tier = DirectoryTier(tmp_path, 3000)
    folder = tmp_path / OWN_FOLDER / NAMES[0][:2] / NAMES[0]
    folder.mkdir(parents=True)
    young, old = folder / f".new-{1:032x}", folder / f".new-{2:032x}"
    for left in (young, old):
        left.write_bytes(bytes(2000))
    os.utime(old, (1, 1))
    assert tier.store(NAMES[1], WHOLE, bytes(1500))
    assert tier.store(NAMES[2], WHOLE, bytes(1500)), "room is made, which also looks for what was left"
    assert (young.exists(), old.exists()) == (True, False)


def test_a_store_waits_for_another_process_that_has_the_ledger(tmp_path: Path) -> None:
    tier = DirectoryTier(tmp_path, 1 << 20)
    with (tmp_path / OWN_FOLDER / ".ledger").open("r+") as ledger:
        fcntl.flock(ledger, fcntl.LOCK_EX)
        storing = threading.Thread(target=tier.store, args=(NAMES[0], WHOLE, PAYLOAD))
        storing.start()
        storing.join(0.3)
        assert storing.is_alive()
        assert tier.parts(NAMES[0]) == []
    storing.join(30)
    assert tier.load(NAMES[0], WHOLE) == PAYLOAD


def test_two_processes_share_a_directory_within_its_limit(tmp_path: Path) -> None:
    """Both write the same blocks, more than there is room for; what either can read is right, and the bound holds."""
    limit = 8 * file_bytes(NAMES[0], WHOLE, len(PAYLOAD))
    command = [sys.executable, "-m", "tests.support.kv.tier_writer", str(tmp_path), str(limit), "60"]
    others = [subprocess.Popen(command, cwd=ROOT) for _ in range(2)]
    try:
        assert [other.wait(timeout=100) for other in others] == [0, 0]
    finally:
        for other in others:
            other.kill()
    tier = DirectoryTier(tmp_path, limit)
    files = [path.stat().st_size for path in tmp_path.glob("*/??/*/*")]
    assert 0 < sum(files) == tier.num_bytes <= limit


# The writer's thread


class _Gate:
    """A shared tier that stores once it is opened, or fails."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.stored: list[str] = []
        self.broken = False

    def store(self, block: str, part: BlockPart, data: bytes, place: int) -> bool:
        assert self.opened.wait(30)
        if self.broken:
            raise RuntimeError("planted")
        self.stored.append(block)
        return True


def test_a_slow_disk_turns_pieces_away_instead_of_waiting() -> None:
    gate = _Gate()
    writer = BackgroundWriter(gate, 250)  # type: ignore[arg-type]
    assert [writer.offer(name, WHOLE, bytes(100)) for name in NAMES[:3]] == [True, True, False]
    assert writer.num_turned_away == 1
    with pytest.raises(TimeoutError, match="200 bytes are not yet written"):
        writer.flush(0.01)
    gate.opened.set()
    writer.flush(30)
    assert gate.stored == NAMES[:2]
    assert writer.offer(NAMES[3], WHOLE, bytes(100))
    writer.close(30)
    assert gate.stored == [*NAMES[:2], NAMES[3]]
    assert not writer.offer(NAMES[4], WHOLE, bytes(1))


def test_a_tier_that_raises_ends_neither_the_thread_nor_the_count() -> None:
    gate = _Gate()
    gate.broken = True
    gate.opened.set()
    writer = BackgroundWriter(gate, 250)  # type: ignore[arg-type]
    writer.offer(NAMES[0], WHOLE, bytes(100))
    writer.flush(30)
    gate.broken = False
    writer.offer(NAMES[1], WHOLE, bytes(100))
    writer.flush(30)
    assert (writer.num_failed, gate.stored) == (1, [NAMES[1]])


# Tiers together


def test_what_host_memory_gave_up_comes_back_from_the_directory(tmp_path: Path) -> None:
    tiers = Tiers(KV_FORMAT, HostTier(2 * len(PAYLOAD)), DirectoryTier(tmp_path, 1 << 30))
    for name in NAMES[:5]:
        tiers.keep(name, WHOLE, PAYLOAD)
        assert tiers.share(name, WHOLE, PAYLOAD)
    tiers.flush(30)
    assert tiers.count(NAMES, [WHOLE]) == 5
    assert tiers.fetch(NAMES[4], WHOLE) == tiers.fetch(NAMES[0], WHOLE) == tiers.fetch(NAMES[0], WHOLE) == PAYLOAD
    assert tiers.fetch(NAMES[9], WHOLE) is None
    assert tiers.hits == {"host": 2, "shared": 1, "miss": 1}
    with pytest.raises(ValueError, match=r"has 3 bytes, but should have"):
        tiers.keep(NAMES[0], WHOLE, b"abc")
    tiers.close()


def test_pieces_that_the_directory_did_not_get_are_counted(tmp_path: Path) -> None:
    tiers = Tiers(KV_FORMAT, HostTier(1 << 20), DirectoryTier(tmp_path, 10), queue_bytes=len(PAYLOAD))
    assert tiers.share(NAMES[0], WHOLE, PAYLOAD)
    tiers.flush(30)
    assert tiers.num_unwritten == 1, "more than the directory may take"
    tiers.close()
    assert not tiers.share(NAMES[1], WHOLE, PAYLOAD)
    assert tiers.num_unwritten == 2, "turned away"


def test_without_a_shared_tier_there_is_host_memory() -> None:
    tiers = Tiers(KV_FORMAT, HostTier(1 << 20))
    tiers.keep(NAMES[0], WHOLE, PAYLOAD)
    assert not tiers.share(NAMES[1], WHOLE, PAYLOAD)
    assert tiers.fetch(NAMES[0], WHOLE) == PAYLOAD
    assert tiers.fetch(NAMES[1], WHOLE) is None
    tiers.close()


# Layouts

LAYOUTS = [
    ("gqa", "tp=2", "pp=3"),
    ("gqa", "tp=6,dcp=2", "cp=2,tp=3"),
    ("mqa", "tp=4,pp=2", "tp=3"),
    ("mla", "tp=3", "pp=2,tp=2,dcp=2"),
    ("gqa", "cp=3", "tp=1"),
]


class _Replica:
    """The ranks of a layout with tiers of their own over one directory."""

    def __init__(self, family: str, layout: str, directory: Path, page_tokens: int = 16) -> None:
        self.spec, self.side = model(family), Side(Layout.parse(layout), page_tokens)
        self.kv_format = KVFormat.of(self.spec, "a" * 64, "float32", 16)
        self.case = Case(self.spec, self.side, self.side, 48)
        self.ranks = self.case.ranks(self.side, 5)
        self.tiers = {at: Tiers(self.kv_format, HostTier(1 << 20), DirectoryTier(directory, 1 << 30)) for at in self.ranks}
        self.blocks = {
            at: RankBlocks(self.tiers[at], self.spec, self.side, at, rank.cache, rank.held.kv_heads.start)
            for at, rank in self.ranks.items()
        }

    def save(self, names: list[str]) -> int:
        saved = 0
        for at, rank in self.ranks.items():
            rank.fill(48)
            saved += self.blocks[at].save(range(3), names, rank.table)
        for tiers in self.tiers.values():
            tiers.flush(30)
        return saved

    def load(self, names: list[str]) -> list[int]:
        found = []
        for at, rank in self.ranks.items():
            rank.fill(0)
            found.append(self.blocks[at].load(range(3), names, rank.table))
        return found

    def wrong(self, tokens: int) -> int:
        return sum(rank.wrong(tokens) for rank in self.ranks.values())


def _names(kv_format: KVFormat) -> list[str]:
    chain = PrefixChain("", 16)
    chain.extend(list(range(48)))
    return [kv_format.name(each) for each in chain.hashes]


@pytest.mark.parametrize("page_tokens", [16, 32])
@pytest.mark.parametrize(("family", "written", "read"), LAYOUTS)
def test_written_under_one_layout_read_under_another(
    tmp_path: Path, family: str, written: str, read: str, page_tokens: int
) -> None:
    writer = _Replica(family, written, tmp_path)
    names = _names(writer.kv_format)
    once = 48 * writer.spec.num_layers * writer.spec.num_kv_heads * writer.spec.kv_planes * writer.spec.kv_dim * 4
    assert writer.save(names) == once, "each byte is shared by one rank"
    reader = _Replica(family, read, tmp_path, page_tokens)
    assert reader.load(names) == [3] * len(reader.ranks)
    assert reader.wrong(48) == 0
    assert writer.load(names) == [3] * len(writer.ranks)
    assert writer.wrong(48) == 0
    assert all(set(tiers.hits) <= {"host"} for tiers in writer.tiers.values()), "a rank keeps all it has"


def test_a_missing_part_of_a_block_ends_the_hit_there(tmp_path: Path) -> None:
    writer = _Replica("gqa", "tp=2", tmp_path)
    names = _names(writer.kv_format)
    writer.save(names)
    (tmp_path / OWN_FOLDER / names[1][:2] / names[1] / "l0-4_h2-3_p0-16").unlink()
    reader = _Replica("gqa", "pp=3", tmp_path)
    assert reader.load(names) == [1, 1, 1]
    assert [tiers.count(names, reader.blocks[at].parts(0)) for at, tiers in reader.tiers.items()] == [1, 1, 1]
    assert reader.wrong(16) == 0, "what follows is not touched"


def test_of_a_sequence_the_last_blocks_count_as_used_longest_ago(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "_PLACE_S", 1000)
    writer = _Replica("gqa", "tp=1", tmp_path)
    names = _names(writer.kv_format)

    def used() -> list[float]:
        return [path.stat().st_mtime for name in names for path in (tmp_path / OWN_FOLDER / name[:2] / name).iterdir()]

    writer.save(names)
    assert used() == sorted(used(), reverse=True)
    for at, path in enumerate(tmp_path / OWN_FOLDER / name[:2] / name for name in names):
        [part] = path.iterdir()
        os.utime(part, (at, at))
    reader = _Replica("gqa", "tp=1", tmp_path)
    assert reader.load(names) == [3]
    assert used() == sorted(used(), reverse=True)
    assert min(used()) > 3


def test_a_rank_that_keeps_none_of_a_block_needs_none_of_it(tmp_path: Path) -> None:
    replica = _Replica("gqa", "cp=2", tmp_path)
    assert [bool(replica.blocks[0].parts(place)) for place in range(4)] == [True, False, True, False]
