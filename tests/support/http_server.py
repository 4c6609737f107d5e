"""An application behind a real server on a real socket."""

from __future__ import annotations

import socket
import threading
from typing import Any, Self

import uvicorn

DEADLINE_S = 10


class Server(uvicorn.Server):
    """Says when it listens, and on which port the kernel put it."""

    def __init__(self, app: Any) -> None:
        super().__init__(uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1))
        self.listening = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self.run, args=([self._socket],))
        self._thread.start()
        assert self.listening.wait(DEADLINE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.should_exit = True
        self._thread.join(DEADLINE_S)
        self._socket.close()
