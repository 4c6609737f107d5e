"""KV pages from ranks to ranks in one process: every value, the bytes counted, staging, refusals, transfers that end badly."""

from __future__ import annotations

import pytest
import torch

from actors.kv_transfer.compatibility import IncompatiblePeerError
from actors.kv_transfer.endpoint import CopyTarget, KVEndpoint, StagingFullError
from actors.kv_transfer.local import LocalTransport, Switchboard
from actors.kv_transfer.pages import CacheShape, copy_ranges
from actors.kv_transfer.staging import STAGE_BELOW, Staging, is_small
from actors.kv_transfer.transport import Ranges, TransferError
from placement.layout.layout import Layout
from placement.ownership.handoff import Side, handoff
from placement.ownership.handoff_pages import PageTable
from tests.support.kv.transfer_cases import CASES, Case, Rank, compatibility, endpoint, expect_all, send_all, wait_for_copies


class Both:
    """Writers and readers of a case on one switchboard."""

    def __init__(self, name: str, staging_bytes: int = 1 << 20, held: bool = False) -> None:
        self.case, self.board = Case.named(name), Switchboard(held)
        self.writers, self.readers = self.case.writers(), self.case.readers()
        self.sending = self._ends("writer", self.writers, 1 << 20)
        self.reading = self._ends("reader", self.readers, staging_bytes)
        self.reader_metadata = {at: end.agent_metadata() for at, end in self.reading.items()}
        self.tables = {at: rank.table for at, rank in self.readers.items()}

    def _ends(self, name: str, ranks: dict[int, Rank], staging_bytes: int) -> dict[int, KVEndpoint]:
        made = {at: LocalTransport(self.board, f"{name}{at}") for at in ranks}
        return {at: endpoint(self.case, rank, made[at], staging_bytes) for at, rank in ranks.items()}

    def send(self, targets: list[CopyTarget]) -> list[object]:
        return list(send_all(self.case, self.writers, self.sending, self.reader_metadata, self.tables, targets))

    def wrong(self, tokens: int) -> int:
        return sum(rank.wrong(tokens) for rank in self.readers.values())


@pytest.mark.parametrize("staging_bytes", [0, 1 << 20])
@pytest.mark.parametrize("name", CASES)
def test_every_value_arrives_and_nothing_else_changes(name: str, staging_bytes: int) -> None:
    both = Both(name, staging_bytes)
    assert both.wrong(0) == 0
    targets = expect_all(both.case, both.readers, both.reading)
    assert all((target.staged_at is not None) == (staging_bytes > 0) for target in targets)
    sendings = both.send(targets)
    assert len(wait_for_copies(both.case, both.reading)) == len(both.case.copies)
    assert both.wrong(both.case.tokens) == 0
    assert all(sending.is_done() for sending in sendings)
    for at, end in both.sending.items():
        mapped = sum(copy.num_bytes(both.case.spec, "float32") for copy in both.case.copies if copy.source == at)
        assert end.bytes_sent == mapped
    assert all(end.num_expected == end.num_stray == 0 for end in both.reading.values())


def test_a_wrong_head_would_be_seen() -> None:
    """The comparison can fail: one value of one head."""
    both = Both("heads split again")
    both.send(expect_all(both.case, both.readers, both.reading))
    wait_for_copies(both.case, both.reading)
    rank = both.readers[0]
    rank.cache.runs(rank.held.layers.start)[0, 0, 0, 0] += 1
    assert both.wrong(both.case.tokens) == 1


def test_nothing_is_there_before_its_notice_and_staging_runs_come_back() -> None:
    both = Both("heads split again", held=True)
    sendings = both.send(expect_all(both.case, both.readers, both.reading))
    assert [end.poll() for end in both.reading.values()] == [[]] * len(both.reading)
    assert not any(sending.is_done() for sending in sendings)
    assert both.wrong(0) == 0
    both.board.deliver(1)
    assert [name for end in both.reading.values() for name in end.poll()] == ["copy 0"]
    assert both.board.deliver() == len(sendings) - 1
    assert all(sending.is_done() for sending in sendings)
    assert all(end._staging.num_reserved == 0 for end in both.sending.values())


def test_a_forgotten_copy_that_comes_after_all_changes_no_page() -> None:
    both = Both("heads split again", held=True)
    targets = expect_all(both.case, both.readers, both.reading)
    assert all(target.staged_at is not None for target in targets)
    both.send(targets)
    for end in both.reading.values():
        for index in range(len(targets)):
            end.forget(f"copy {index}")
        assert (end.num_expected, end._staging.num_reserved) == (0, 0)
    both.board.deliver()
    assert [end.poll() for end in both.reading.values()] == [[]] * len(both.reading)
    assert sum(end.num_stray for end in both.reading.values()) == len(targets)
    assert both.wrong(0) == 0


def test_a_peer_that_closes_ends_the_transfer_with_its_name() -> None:
    both = Both("heads split again", held=True)
    targets = expect_all(both.case, both.readers, both.reading)
    sendings = both.send(targets)
    for end in both.reading.values():
        end.close()
    both.board.deliver()
    with pytest.raises(TransferError, match="peer reader0 closed before"):
        sendings[0].is_done()
    with pytest.raises(TransferError, match="no transport 'reader0'"):
        both.sending[0].connect(both.reader_metadata[0])


def test_names_are_used_once() -> None:
    both = Both("heads split again")
    expect_all(both.case, both.readers, both.reading)
    with pytest.raises(ValueError, match="'copy 0' is expected already"):
        expect_all(both.case, both.readers, both.reading)


def test_a_full_staging_buffer_here_is_an_error_that_says_to_wait() -> None:
    both = Both("heads split again", held=True)
    both.sending[0]._staging.reserve((1 << 20) - 64)
    with pytest.raises(StagingFullError, match="wait for a copy to end"):
        both.send(expect_all(both.case, both.readers, both.reading))


# The handshake


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_digest": "b" * 64}, f"model_digest is '{'a' * 64}' here and '{'b' * 64}' there"),
        ({"dtype": "bfloat16"}, "dtype is 'float32' here and 'bfloat16' there"),
        ({"kv_heads": 6}, "kv_heads is 3 here and 6 there"),
        ({"page_layout": "tokens first"}, "here and 'tokens first' there"),
        ({"protocol": 2}, "protocol is 1 here and 2 there"),
        ({"transport": "test 2"}, "transport is 'test 1' here and 'test 2' there"),
    ],
)
def test_a_peer_whose_pages_mean_something_else_is_refused_with_both_values(changes: dict[str, object], message: str) -> None:
    both = Both("heads split again")
    rank = both.readers[0]
    stranger = KVEndpoint(
        LocalTransport(both.board, "stranger"), rank.cache, rank.held, compatibility(both.case.spec, **changes), 0
    )
    with pytest.raises(IncompatiblePeerError) as refused:
        both.sending[0].connect(stranger.agent_metadata())
    assert message in str(refused.value)


def test_all_differences_are_reported_at_once_and_nonsense_is_refused() -> None:
    both = Both("heads split again")
    ours = compatibility(both.case.spec)
    assert len(list(ours.differences(compatibility(both.case.spec, dtype="float16", kv_dim=9, num_layers=1)))) == 3
    with pytest.raises(TransferError, match="agent metadata of 3 bytes cannot be read"):
        both.sending[0].connect(b"abc")


# Parts


def test_ranges_outside_a_pool_are_refused_before_anything_is_written() -> None:
    sizes = {0: 100, 1: 50}
    Ranges.single(0, 0, 1, 0, 50).check(sizes, sizes)
    with pytest.raises(ValueError, match=r"bytes 10\.\.60 of the peer's pool 1, which has 50"):
        Ranges.single(0, 0, 1, 10, 50).check(sizes, sizes)
    with pytest.raises(ValueError, match=r"bytes -1\.\.49 of own pool 0"):
        Ranges.single(0, -1, 1, 0, 50).check(sizes, sizes)
    with pytest.raises(ValueError, match="own pool 2 is not registered"):
        Ranges.single(2, 0, 1, 0, 50).check(sizes, sizes)


def test_the_rule_of_staging() -> None:
    assert is_small(100, 100 * STAGE_BELOW - 1)
    assert not is_small(100, 100 * STAGE_BELOW)
    assert not is_small(1, 8)


def test_staging_runs_do_not_overlap_and_are_used_again() -> None:
    staging = Staging(torch.zeros(1024, dtype=torch.uint8))
    first, second, third = (staging.reserve(300) for _ in range(3))
    assert (first, second, third) == (0, 320, 640)
    assert staging.reserve(300) is None
    assert staging.reserve(64) == 960
    staging.release(320)
    assert staging.reserve(200) == 320
    assert staging.reserve(100) is None
    assert staging.num_reserved == 320 + 256 + 320 + 64
    with pytest.raises(KeyError):
        staging.release(1)


def test_neighbouring_pages_are_one_range() -> None:
    """Pages in order on both sides: one range for each head, plane and layer, whatever the page sizes are."""
    case = Case.named("heads split again")
    spec, ours, theirs = case.spec, Side(Layout(), 16), Side(Layout(), 32)
    [copy] = handoff(spec, ours, theirs, range(200))
    one, two = (Case(spec, side, side, 200).ranks(side, 0)[0] for side in (ours, theirs))
    shapes = [CacheShape.of(rank.cache, rank.held) for rank in (one, two)]
    tables = [PageTable(one.held.ownership, range(13)), PageTable(two.held.ownership, range(7))]
    ranges = copy_ranges(copy, shapes[0], tables[0], shapes[1], tables[1])
    assert len(ranges) == 4 * 2 * 3
    assert ranges.num_bytes == copy.num_bytes(spec, "float32")
