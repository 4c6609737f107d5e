"""The ZeroMQ link, over real sockets."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from actors.engine.config.engine_config import EngineConfig
from actors.engine.engine import Engine
from actors.engine.link.link import LinkClosed, LinkError, LinkTimeout
from actors.engine.link.scripted import ScriptedRank, continuation
from actors.engine.link.zmq_link import Hello, ZmqEngineLink, ZmqRankLink
from actors.wire.plans import Row, StepPlan
from actors.wire.requests import GenerateRequest, TokenEvent
from actors.wire.results import Sampled, StepResult

WAIT_S = 20.0
PLAN = StepPlan(step=0, rows=[Row(sequence_id=1, start=0, count=2, append=[5], new_blocks=[3], sample=True)])
RESULT = StepResult(step=0, sampled=[Sampled(sequence_id=1, token=9)], seconds=0.5)

Close = Callable[..., None]


@pytest.fixture
def closing() -> Iterator[Callable[..., None]]:
    """Closes the links handed to it, ranks first."""
    links: list[ZmqEngineLink | ZmqRankLink] = []
    yield lambda *more: links.extend(more)
    for link in reversed(links):
        link.close()


def connect(closing: Close, world: int = 2, bind: str = "tcp://127.0.0.1:*") -> tuple[ZmqEngineLink, list[ZmqRankLink]]:
    engine = ZmqEngineLink(world, [world - 1], "token", bind)
    ranks = [ZmqRankLink(engine.address, rank, "token") for rank in range(world)]
    closing(engine, *ranks)
    engine.wait_ready(WAIT_S)
    return engine, ranks


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_a_plan_reaches_every_rank_and_the_output_rank_answers(closing: Close, transport: str, tmp_path: Path) -> None:
    engine, ranks = connect(closing, 3, "tcp://127.0.0.1:*" if transport == "tcp" else f"ipc://{tmp_path}/e")
    engine.send(PLAN)
    assert [rank.receive_plan(WAIT_S) for rank in ranks] == [PLAN] * 3
    ranks[0].send_result(RESULT.model_copy(update={"step": 5}))
    with pytest.raises(LinkTimeout):
        engine.receive(0.1)  # only the output rank's result counts
    ranks[2].send_result(RESULT)
    assert engine.receive(WAIT_S) == RESULT


def test_a_step_has_come_when_every_dp_rank_has_answered_it(closing: Close) -> None:
    engine = ZmqEngineLink(4, [0, 2], "token")
    ranks = [ZmqRankLink(engine.address, rank, "token") for rank in range(4)]
    closing(engine, *ranks)
    engine.wait_ready(WAIT_S)
    tokens = [Sampled(sequence_id=number, token=number) for number in range(3)]
    ranks[2].send_result(StepResult(step=0, sampled=tokens[2:], seconds=0.2))
    ranks[2].send_result(StepResult(step=1, seconds=0.1))
    with pytest.raises(LinkTimeout, match=r"no result from ranks \[0\] within"):
        engine.receive(0.1)
    ranks[0].send_result(StepResult(step=0, seconds=0.1))
    ranks[0].send_result(StepResult(step=1, sampled=tokens[:2]))
    assert engine.receive(WAIT_S) == StepResult(step=0, sampled=tokens[2:], seconds=0.2)
    assert engine.receive(WAIT_S) == StepResult(step=1, sampled=tokens[:2], seconds=0.1)
    ranks[0].send_result(StepResult(step=2))
    ranks[2].send_result(StepResult(step=3))
    with pytest.raises(LinkError, match="the DP ranks answer different steps: rank 0 step 2, rank 2 step 3"):
        engine.receive(WAIT_S)


def test_ranks_may_come_before_the_engine(closing: Close, tmp_path: Path) -> None:
    rank = ZmqRankLink(f"ipc://{tmp_path}/e", 0, "token")
    engine = ZmqEngineLink(1, [0], "token", f"ipc://{tmp_path}/e")
    closing(engine, rank)
    engine.wait_ready(WAIT_S)
    engine.send(PLAN)
    assert rank.receive_plan(WAIT_S) == PLAN


def test_waiting_ends_and_names_who_is_missing(closing: Close) -> None:
    engine = ZmqEngineLink(3, [2], "token")
    closing(engine, ZmqRankLink(engine.address, 1, "token"))
    with pytest.raises(LinkTimeout, match=r"ranks \[0, 2\] of 3 did not connect to tcp://127.0.0.1:\d+ within 0.3 s"):
        engine.wait_ready(0.3)
    with pytest.raises(LinkTimeout, match=r"no result from ranks \[2\] within 0\.01 s"):
        engine.receive(0.01)


def test_strangers_are_logged_and_ignored(closing: Close, caplog: pytest.LogCaptureFixture) -> None:
    engine = ZmqEngineLink(1, [0], "token")
    stranger = ZmqRankLink(engine.address, 0, "guess")
    outside = ZmqRankLink(engine.address, 7, "token")
    stranger.send_result(RESULT)
    stranger.send_failure("let me in")
    garbage = zmq.Context.instance().socket(zmq.DEALER)
    garbage.connect(engine.address)
    for frames in ([b"H", b"\xc1 not msgpack"], [b"H", b"\x01"], [b"H"], [b"", b"", b""], [b"R", RESULT.pack()]):
        garbage.send_multipart(frames)
    garbage.send_multipart([b"H", Hello(world_rank=0, token="token").pack()])  # last, so all before it has been read
    closing(engine, stranger, outside)
    with caplog.at_level(logging.WARNING):
        engine.wait_ready(WAIT_S)
        garbage.send_multipart([b"R", RESULT.pack()])
        assert engine.receive(WAIT_S) == RESULT
        with pytest.raises(LinkTimeout):
            engine.receive(0.2)  # whatever the strangers sent last
    for part in ("its token is not that of these ranks", "not one of 1 ranks", "malformed hello", "3 frames", "no hello"):
        assert part in caplog.text
    with pytest.raises(LinkTimeout):
        stranger.receive_plan(0.01)
    garbage.close(0)


def test_a_rank_cannot_be_taken_over(closing: Close, caplog: pytest.LogCaptureFixture) -> None:
    engine, ranks = connect(closing)
    second = ZmqRankLink(engine.address, 0, "token")
    closing(second)
    with caplog.at_level(logging.WARNING), pytest.raises(LinkTimeout):
        engine.receive(0.3)
    assert "ignored rank 0" in caplog.text
    engine.send(PLAN)
    assert ranks[0].receive_plan(WAIT_S) == PLAN
    with pytest.raises(LinkTimeout):
        second.receive_plan(0.01)


def test_malformed_bytes_are_a_typed_error(closing: Close) -> None:
    engine, ranks = connect(closing)
    for data in (b"", b"\xc1", b"\x80", b"\x01\x02", RESULT.pack()[:-1], PLAN.pack()):
        ranks[1]._socket.send_multipart([b"R", data])
        with pytest.raises(LinkError, match="malformed result of rank 1"):
            engine.receive(WAIT_S)
        peer = next(peer for peer, rank in engine._peers.items() if rank == 0)
        engine._socket.send_multipart([peer, b"P", data[:-1]])
        with pytest.raises(LinkError, match="malformed plan"):
            ranks[0].receive_plan(WAIT_S)


def test_a_rank_that_fails_says_why(closing: Close) -> None:
    engine, ranks = connect(closing)
    ranks[0].send_failure("out of memory")
    with pytest.raises(LinkError, match="rank 0 failed: out of memory"):
        engine.receive(WAIT_S)


def test_a_rank_that_left_is_noticed_when_a_plan_is_sent(closing: Close) -> None:
    engine, ranks = connect(closing)
    monitor = engine._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    ranks[0].close()
    assert monitor.poll(WAIT_S * 1000)
    engine._socket.disable_monitor()
    deadline = time.monotonic() + WAIT_S  # the socket hears of it a little later than its monitor

    def send_until_it_is_noticed() -> None:
        while time.monotonic() < deadline:
            engine.send(PLAN)

    with pytest.raises(LinkError, match="plan 0 cannot be sent to rank 0"):
        send_until_it_is_noticed()


def test_closing_tells_the_ranks(closing: Close) -> None:
    engine, ranks = connect(closing)
    engine.close()
    engine.close()
    for rank in ranks:
        with pytest.raises(LinkClosed):
            rank.receive_plan(WAIT_S)


def serve_rank(address: str, world_rank: int, output_rank: bool, settings: EngineConfig) -> int:
    """A rank's loop with a scripted model; the number of plans it ran."""
    link, rank = ZmqRankLink(address, world_rank, "token"), ScriptedRank(settings.num_blocks, settings.block_size)
    try:
        while True:
            result = rank.run(link.receive_plan(WAIT_S))
            if output_rank:
                link.send_result(result)
    except LinkClosed:
        return len(rank.plans)
    finally:
        link.close()


def test_an_engine_over_ranks_in_threads() -> None:
    settings = EngineConfig(num_blocks=24, block_size=4, max_model_len=90, max_batch_tokens=32, max_sequences=8)
    link = ZmqEngineLink(2, [1], "token")
    done, outputs = threading.Semaphore(0), dict[str, list[int]]()

    def deliver(event: TokenEvent) -> None:
        outputs.setdefault(event.request_id, []).extend(event.tokens)
        if event.finish:
            done.release()

    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(serve_rank, link.address, rank, rank == 1, settings) for rank in range(2)]
        link.wait_ready(WAIT_S)
        engine = Engine(settings, link)
        engine.start()
        for number in range(30):
            engine.submit(GenerateRequest(request_id=str(number), prompt=[number, 1, 2], max_tokens=20), deliver)
        assert all(done.acquire(timeout=WAIT_S) for _ in range(30))
        steps = engine.stats().steps
        engine.close()
        assert [rank.result(WAIT_S) for rank in ranks] == [steps, steps]
    for number in range(30):
        assert outputs[str(number)] == continuation([number, 1, 2], 20, 1000)
