"""Ranges of layers that are sent while a step runs: which, when, and never before their values are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from actors.kv_transfer.endpoint import KVEndpoint, Sending
from actors.kv_transfer.queue_order import OneBehind
from actors.model.decoder import Decoder
from placement.ownership.handoff import Copy
from tests.cpu.kv.test_pools import alone, config, greedy
from tests.support.inprocess import in_process
from tests.support.kv.pools import pools
from tests.support.models.tiny_models import tiny

torch.set_num_threads(1)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[range, range, int]]:
    """Layers and positions of each write, and how many layers of the step had run by then."""
    seen, ran = list[tuple[range, range, int]](), list[None]()
    send, watch = KVEndpoint.send, Decoder.watch

    def noted(self: KVEndpoint, peer: object, name: str, copy: Copy, *rest: object) -> Sending:
        seen.append((copy.layers, copy.positions.window, len(ran)))
        return send(self, peer, name, copy, *rest)

    def watched(self: Decoder, ranges: list[range], report: Callable[[range], None]) -> None:
        self.register_forward_pre_hook(lambda *_: ran.clear())
        for layer in self.layers.values():
            layer.register_forward_hook(lambda *_: ran.append(None))
        watch(self, ranges, report)

    monkeypatch.setattr(KVEndpoint, "send", noted)
    monkeypatch.setattr(Decoder, "watch", watched)
    return seen


def test_each_range_of_a_chunk_goes_when_its_last_layer_has_run(sent: list[tuple[range, range, int]]) -> None:
    model = tiny("llama3", num_hidden_layers=6)
    with in_process(model, "", config(16)) as replica:
        expected = replica.run(greedy(200)).tokens
    with pools(model, "", "", config(16), config(16)) as both:
        assert both.run(greedy(200)).tokens == expected
    chunks = [range(start, min(start + 48, 200)) for start in range(0, 200, 48)]
    layers = [range(0, 1), range(1, 3), range(3, 4), range(4, 6)]
    assert sent == [(each, chunk, each.stop) for chunk in chunks for each in layers]


def test_ranges_of_few_bytes_go_together(sent: list[tuple[range, range, int]]) -> None:
    """A layer of a chunk of 48 tokens has 48 * 2 heads * 64 bytes."""
    with pools(tiny("llama3"), "", "", config(16), config(16), range_bytes=48 * 2 * 64 + 1) as both:
        assert both.run(greedy(200)).tokens == alone("gqa")["r200"].tokens
    chunks = [range(start, min(start + 48, 200)) for start in range(0, 200, 48)]
    pairs = [(layers, chunk, layers.stop) for chunk in chunks[:-1] for layers in (range(2), range(2, 4))]
    assert sent == [*pairs, (range(4), chunks[-1], 4)]


def test_what_is_run_for_no_ticket_is_not_sent(sent: list[tuple[range, range, int]]) -> None:
    with pools(tiny("llama3"), "", "", config(16), config(16), least_tokens=40) as both:
        assert both.run(greedy(33)).tokens == alone("gqa")["r33"].tokens  # too short
        assert both.prefill.run(greedy(200)).tokens == alone("gqa")["r200"].tokens
    assert sent == []


class FakeCuda:
    """Does what it is queued when asked to; says in `log` what waits for what."""

    def __init__(self) -> None:
        self.log = list[str]()
        self.queued = 0

    def Event(self) -> FakeCuda.Moment:
        return FakeCuda.Moment()

    def Stream(self, device: torch.device) -> FakeCuda:
        return self

    def current_stream(self, device: torch.device) -> FakeCuda:
        return self

    def wait_event(self, moment: FakeCuda.Moment) -> None:
        self.log.append(f"wait for {moment.after}")

    @contextmanager
    def stream(self, stream: FakeCuda) -> Iterator[None]:
        yield
        self.log.append("back on the step's stream")

    class Moment:
        after = 0

        def record(self, stream: FakeCuda) -> None:
            self.after = stream.queued


def test_a_device_has_the_next_range_to_do_while_the_host_sends_the_one_before() -> None:
    cuda = FakeCuda()
    order = OneBehind(torch.device("cpu"), cuda)
    for number in (1, 2):
        cuda.queued = number
        cuda.log.append(f"queue {number}")
        order.put(partial(cuda.log.append, f"send {number}"))
    order.flush()
    order.flush()
    sends = [[f"wait for {number}", f"send {number}", "back on the step's stream"] for number in (1, 2)]
    assert cuda.log == ["queue 1", "queue 2", *sends[0], *sends[1]]
