"""A TCP relay between a replica and Redis that loses, holds and cuts what passes.

It runs in a thread of its own. Delays do not throttle: each piece is handed on its time after
it came, as on a longer wire. Commands and replies are counted (RESP2, no pub/sub), so that a
connection can be reset exactly after Redis has run a command and before its answer comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

import hiredis

from tests.support.rawnode import RESET_ON_CLOSE

if TYPE_CHECKING:
    from collections.abc import Callable

Command = list[bytes]


class _Pair:
    """One connection: the replica's side (near), Redis' side (far), a direction for each."""

    def __init__(self, relay: Relay, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.relay = relay
        self.near = near
        self.far = far
        self.doomed = False  # the replica hears nothing more; reset when Redis has run it all
        self.unanswered = 0
        self._commands = hiredis.Reader()
        self._replies = hiredis.Reader()

    async def commands(self, reader: asyncio.StreamReader) -> None:
        """Replica to Redis."""
        async for data in self._delayed(reader, lambda: self.relay.delay_commands_s):
            await self.relay._open.wait()
            for command in _parsed(self._commands, data):
                self.unanswered += 1
                doom = self.relay._doom
                if doom is not None and doom(command):
                    self.doomed = True
                    if self.relay._doom_before:
                        self.reset()
                        return
            self.far.write(data)

    async def replies(self, reader: asyncio.StreamReader) -> None:
        """Redis to replica."""
        relay = self.relay
        async for data in self._delayed(reader, lambda: relay.delay_replies_s):
            await relay._open.wait()
            if (wait := relay._withheld_until - monotonic()) > 0:
                await asyncio.sleep(wait)
            self.unanswered -= len(_parsed(self._replies, data))
            if self.doomed:
                if self.unanswered <= 0:
                    self.reset()
                    return
                continue
            if relay._cut:
                relay._cut = False
                self.near.write(data[: len(data) // 2])
                await asyncio.sleep(0.02)  # let the half arrive before the reset
                self.reset()
                return
            self.near.write(data)

    async def _delayed(self, reader: asyncio.StreamReader, delay_s: Callable[[], float]) -> Any:
        """What is read, each piece handed on after its delay, in order."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def read() -> None:
            data = b"-"
            while data:
                try:
                    data = await reader.read(262_144)
                except OSError:
                    data = b""
                pieces.put_nowait((monotonic() + delay_s(), data))

        reading = asyncio.create_task(read())
        try:
            while True:
                at, data = await pieces.get()
                if not data:
                    return
                if (wait := at - monotonic()) > 0:
                    await asyncio.sleep(wait)
                yield data
        finally:
            reading.cancel()

    def reset(self) -> None:
        """RST to both sides."""
        for side in (self.near, self.far):
            sock = side.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            side.transport.abort()


def _parsed(reader: hiredis.Reader, data: bytes) -> list[Any]:
    reader.feed(data)
    found = []
    while (one := reader.gets()) is not False:
        found.append(one)
    return found


class Relay:
    """``with Relay(valkey.port) as relay:``; the replica's ``redis.url`` is ``relay.url``."""

    def __init__(self, target_port: int) -> None:
        self.delay_replies_s = 0.0
        self.delay_commands_s = 0.0
        self.accepted = 0
        self.resets = 0
        self._target_port = target_port
        self._withheld_until = 0.0
        self._cut = False
        self._doom: Callable[[Command], bool] | None = None
        self._doom_before = False
        self._pairs: set[_Pair] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._open.set()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._listener: socket.socket | None = _listen(0)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        assert not self._thread.is_alive()

    # What a test can do to the wire

    def pause(self) -> None:
        """Blackhole: sockets stay open, nothing passes; what came is kept for ``resume``."""
        self._do(self._open.clear)

    def resume(self) -> None:
        """End of ``pause``."""
        self._do(self._open.set)

    @property
    def refuse(self) -> bool:
        """Whether new connections are refused. Those that are up stay up."""
        return self._listener is None

    @refuse.setter
    def refuse(self, refuse: bool) -> None:
        self._do(self._shut if refuse else self._listen_again)

    def reset_all(self) -> None:
        """RST every connection that is up."""

        def reset() -> None:
            for pair in list(self._pairs):
                pair.reset()

        self._do(reset)

    def withhold_replies(self, seconds: float) -> None:
        """For so long Redis gets and runs commands, and its replies are kept back."""
        self._withheld_until = monotonic() + seconds

    def reset_after_forwarding(self, predicate: Callable[[Command], bool] | None) -> None:
        """Reset a connection when Redis has run a command that fits, before its reply.

        ``predicate`` gets each command as a list of its words; None ends it.
        """

        def doom(command: Command) -> bool:
            fits = predicate is not None and predicate(command)
            self.resets += fits
            return fits

        self._doom, self._doom_before = doom if predicate else None, False

    def reset_instead_of_forwarding(self, predicate: Callable[[Command], bool]) -> None:
        """Reset a connection when a command that fits comes: Redis never gets it."""
        self.reset_after_forwarding(predicate)
        self._doom_before = True

    def reset_every_nth_script(self, n: int) -> None:
        """``reset_after_forwarding`` each ``n``-th script call."""
        calls = 0

        def every_nth(command: Command) -> bool:
            nonlocal calls
            if command[0] not in {b"EVALSHA", b"EVAL"}:
                return False
            calls += 1
            return calls % n == 0

        self.reset_after_forwarding(every_nth)

    def cut_next_reply(self) -> None:
        """Hand on half of the next reply, then reset."""
        self._cut = True

    def _do(self, action: Callable[[], object]) -> None:
        """Run ``action`` in the relay's thread and wait for it."""
        done = threading.Event()

        def run() -> None:
            action()
            done.set()

        self._loop.call_soon_threadsafe(run)
        assert done.wait(5)

    # The relay's thread

    def _run(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        self._attach()
        loop.run_forever()
        self._shut()
        loop.run_until_complete(asyncio.sleep(0))
        for task in self._tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    def _attach(self) -> None:
        if self._listener is not None:
            self._listener.setblocking(False)
            self._loop.add_reader(self._listener, self._accept)

    def _shut(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _listen_again(self) -> None:
        if self._listener is None:
            self._listener = _listen(self.port)
            self._attach()

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = self._listener.accept()
                self.accepted += 1
                task = self._loop.create_task(self._serve(sock))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _serve(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            near_reader, near = await asyncio.open_connection(sock=sock)
        except BaseException:
            sock.close()
            raise
        try:
            far_reader, far = await asyncio.open_connection("127.0.0.1", self._target_port)
        except BaseException as exc:
            near.transport.abort()
            if isinstance(exc, OSError):
                return  # Redis is down: the replica sees the connection close
            raise
        pair = _Pair(self, near, far)
        self._pairs.add(pair)
        ways = {
            asyncio.create_task(pair.commands(near_reader)),
            asyncio.create_task(pair.replies(far_reader)),
        }
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._pairs.discard(pair)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            near.transport.abort()
            far.transport.abort()


def _listen(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port), backlog=128)
