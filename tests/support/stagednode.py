"""A raw node whose address, health pages and death are the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import struct
from time import monotonic
from typing import TYPE_CHECKING

from tests.support.rawnode import PeerGone, RawNode, json_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.rawnode import Peer, Request, Script

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # socket(7), asm-generic/socket.h
_RETURN_NOTHING = ctypes.create_string_buffer(struct.pack("@HBBI", 0x06, 0, 0, 0))  # BPF: ret #0
_DROP_ALL = struct.pack("@HP", 1, ctypes.addressof(_RETURN_NOTHING))  # struct sock_fprog
_ABSENT = json_answer(404, {"detail": "Not Found"})


class StagedNode(RawNode):
    """A ``RawNode`` at ``host:port`` (0: any free one).

    ``pages`` answers GET requests, path → script, and everything else with 404; None means the
    good pages of ``RawNode``. It may be replaced at any time. ``asked`` are the GET requests that
    came: path and monotonic time.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        pages: dict[str, Script] | None = None,
        models: tuple[str, ...] = ("m",),
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        super().__init__(script, models=models)
        self._listener.close()
        self.host = host
        self._listener = socket.create_server((host, port), backlog=1024)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://{host}:{self.port}"
        self.pages = pages
        self._stopped = False
        self.asked: list[tuple[str, float]] = []
        self._accepted: set[socket.socket] = set()

    def stop(self) -> None:
        """End now: listener and connections are closed."""
        self.__exit__(None, None, None)

    def __exit__(self, *exc: object) -> None:
        if not self._stopped:
            self._stopped = True
            super().__exit__(*exc)

    def shut(self) -> None:
        """Listen no longer; connections that are up stay up."""

        def close() -> None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = socket.socket()  # for the end to close

        self._do(close)

    def listen(self) -> None:
        """Listen again, at the same address."""

        def again() -> None:
            self._listener.close()
            self._listener = socket.create_server((self.host, self.port), backlog=1024)
            self._listener.setblocking(False)
            self._loop.add_reader(self._listener, self._accept)

        self._do(again)

    @contextlib.contextmanager
    def vanished(self) -> Iterator[None]:
        """Dead without closing anything: the kernel drops all that comes, SYN and data alike.

        Nothing is acknowledged or refused. What the script writes still leaves: it must not.
        """
        self._filter(_SO_ATTACH_FILTER, _DROP_ALL)
        try:
            yield
        finally:
            self._filter(_SO_DETACH_FILTER, 0)

    def _filter(self, option: int, value: bytes | int) -> None:
        def set_on_all() -> None:
            for sock in (self._listener, *self._accepted):
                sock.setsockopt(socket.SOL_SOCKET, option, value)

        self._do(set_on_all)

    def _do(self, action: Callable[[], object]) -> None:
        """Run it in the node's thread, and wait for it."""

        async def run() -> None:
            action()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(5)

    async def _converse(self, sock: socket.socket, number: int) -> None:
        self._accepted.add(sock)
        try:
            await super()._converse(sock, number)
        finally:
            self._accepted.discard(sock)

    async def _answer(self, request: Request, peer: Peer) -> None:
        if request.method == "GET":
            self.asked.append((request.target, monotonic()))
            if self.pages is not None:
                self.probes += 1
                with contextlib.suppress(PeerGone):
                    await self.pages.get(request.target, _ABSENT)(request, peer)
                return
        await super()._answer(request, peer)
