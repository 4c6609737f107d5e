"""Token events between engine and ingress over real sockets."""

from __future__ import annotations

import asyncio
import threading

import zmq

from actors.engine.token_stream import ReplyTo, TokenReceiver, TokenSender
from actors.messages import TokenEvent


async def next_event(queue: asyncio.Queue[TokenEvent]) -> TokenEvent:
    return await asyncio.wait_for(queue.get(), 5)


async def test_events_reach_their_request_in_order_from_any_thread() -> None:
    receiver, sender = TokenReceiver.listen("127.0.0.1"), TokenSender()
    queues = {name: receiver.open(name) for name in ("a", "b")}

    def send() -> None:
        for token in range(100):
            for name in queues:
                sender.send(receiver.reply_to, TokenEvent(request_id=name, tokens=[token]))

    thread = threading.Thread(target=send)
    thread.start()
    for queue in queues.values():
        assert [(await next_event(queue)).tokens for _ in range(100)] == [[token] for token in range(100)]
    thread.join()
    sender.close()
    receiver.close()


async def test_strangers_malformed_events_and_forgotten_requests_are_ignored() -> None:
    receiver, sender = TokenReceiver.listen("127.0.0.1"), TokenSender()
    queue = receiver.open("a")
    receiver.open("gone")
    receiver.forget("gone")
    stranger = ReplyTo(address=receiver.reply_to.address, secret=b"x" * 16)
    other = TokenSender()
    other.send(stranger, TokenEvent(request_id="a", tokens=[66]))
    raw = zmq.Context.instance().socket(zmq.PUSH)
    raw.connect(receiver.reply_to.address)
    raw.send_multipart([receiver.reply_to.secret, b"\xc1 not msgpack"])
    raw.send(b"one frame")
    sender.send(receiver.reply_to, TokenEvent(request_id="gone", tokens=[1]))
    sender.send(receiver.reply_to, TokenEvent(request_id="a", tokens=[7]))
    assert (await next_event(queue)).tokens == [7]
    await asyncio.sleep(0)
    assert queue.empty()
    raw.close(linger=0)
    for each in (sender, other, receiver):
        each.close()
