"""Token events between engine and ingress over real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
import zmq

from actors.engine.link.token_stream import IngressGone, ReplyTo, TokenReceiver, TokenSender
from actors.wire.requests import TokenEvent, TokenEvents


async def next_event(queue: asyncio.Queue[TokenEvent]) -> TokenEvent:
    return await asyncio.wait_for(queue.get(), 5)


async def until(happened: Callable[[], bool]) -> None:
    for _ in range(5000):
        if happened():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not happen")


async def sender_to(*receivers: ReplyTo) -> TokenSender:
    sender = TokenSender()
    for to in receivers:
        await until(lambda to=to: sender.connected(to))
    return sender


async def test_events_reach_their_request_in_order_from_any_thread() -> None:
    receiver = TokenReceiver.listen("127.0.0.1")
    sender = await sender_to(receiver.reply_to)
    queues = {name: receiver.open(name) for name in ("a", "b")}

    def send() -> None:
        for token in range(100):
            for name in queues:
                sender.send(receiver.reply_to, TokenEvent(request_id=name, tokens=[token]))
            sender.flush()

    thread = threading.Thread(target=send)
    thread.start()
    for queue in queues.values():
        assert [(await next_event(queue)).tokens for _ in range(100)] == [[token] for token in range(100)]
    thread.join()
    sender.close()
    receiver.close()


async def test_strangers_malformed_events_and_forgotten_requests_are_ignored() -> None:
    receiver = TokenReceiver.listen("127.0.0.1")
    sender = await sender_to(receiver.reply_to)
    queue = receiver.open("a")
    receiver.open("gone")
    receiver.forget("gone")
    stranger = ReplyTo(address=receiver.reply_to.address, secret=b"x" * 16)
    other = await sender_to(stranger)
    other.send(stranger, TokenEvent(request_id="a", tokens=[66]))
    other.flush()
    raw = zmq.Context.instance().socket(zmq.PUSH)
    raw.connect(receiver.reply_to.address)
    raw.send_multipart([receiver.reply_to.secret, b"\xc1 not msgpack"])
    raw.send(b"one frame")
    sender.send(receiver.reply_to, TokenEvent(request_id="gone", tokens=[1]))
    sender.send(receiver.reply_to, TokenEvent(request_id="a", tokens=[7]))
    sender.flush()
    assert (await next_event(queue)).tokens == [7]
    await asyncio.sleep(0)
    assert queue.empty()
    raw.close(linger=0)
    for each in (sender, other, receiver):
        each.close()


def listening() -> tuple[zmq.Socket[bytes], ReplyTo]:
    """An ingress that reads only when the test does."""
    socket = zmq.Context.instance().socket(zmq.PULL)
    socket.rcvtimeo = 5000
    socket.bind("tcp://127.0.0.1:*")
    return socket, ReplyTo(address=socket.getsockopt_string(zmq.LAST_ENDPOINT), secret=b"s")


async def test_the_events_of_a_step_are_one_message_an_ingress() -> None:
    (one, to_one), (two, to_two) = listening(), listening()
    sender = await sender_to(to_one, to_two)
    for name, to in (("a", to_one), ("b", to_two), ("c", to_one)):
        sender.send(to, TokenEvent(request_id=name, tokens=[1]))
    assert not one.poll(50)
    assert not two.poll(50)
    sender.flush()
    sender.flush()
    for socket, names in ((one, ["a", "c"]), (two, ["b"])):
        secret, packed = socket.recv_multipart()
        assert secret == b"s"
        assert [event.request_id for event in TokenEvents.unpack(packed).events] == names
        assert not socket.poll(50)
        socket.close(linger=0)
    sender.close()


async def test_an_ingress_that_is_gone_is_noticed_and_the_others_are_not_disturbed() -> None:
    (leaver, gone), (stayer, here) = listening(), listening()
    sender = await sender_to(gone, here)
    leaver.close(linger=0)
    await until(lambda: not sender.connected(gone))
    with pytest.raises(IngressGone, match=gone.address):
        sender.send(gone, TokenEvent(request_id="a", tokens=[1]))
    sender.send(here, TokenEvent(request_id="b", tokens=[2]))
    sender.flush()
    assert TokenEvents.unpack(stayer.recv_multipart()[1]).events[0].tokens == [2]
    stayer.close(linger=0)
    sender.close()


async def test_a_backlog_of_events_does_not_hold_up_the_event_loop() -> None:
    """Engines may send faster than an ingress reads, for as long as streams run: others must have their turns meanwhile."""
    count = 20_000
    receiver = TokenReceiver.listen("127.0.0.1")
    queue = receiver.open("a")
    sender = await sender_to(receiver.reply_to)
    for token in range(count):
        sender.send(receiver.reply_to, TokenEvent(request_id="a", tokens=[token]))
        sender.flush()
    await until(lambda: not queue.empty())
    turns = 0
    while queue.qsize() < count:
        turns += 1
        await asyncio.sleep(0)
    assert turns > 10
    sender.close()
    receiver.close()
