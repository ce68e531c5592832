"""One HTTP/1.1 connection to a node, carrying one exchange at a time.

httptools parses; what is here is what forwarding needs: one request, sized; an answer, sized,
chunked or ended by the close; one lazy timer on silence; back-pressure; an immediate close when
the client leaves. HTTP/1.1: RFC 9112.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from time import monotonic
from typing import TYPE_CHECKING, cast

import httptools

from app.cluster.names import left
from app.gateway.alarm import Alarm

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

Headers = list[tuple[bytes, bytes]]

_HEAD_BYTES = 256 * 1024
_READ_AHEAD_BYTES = 256 * 1024  # what a slow client may leave unread before the node is stalled
# A reused connection that closes within this time without a byte was closed while idle; and so
# was its node, if nothing of the request has arrived by then.
_STALE_WITHIN_S = 1.0
_U32 = struct.Struct("@I")


class StaleConnection(Exception):  # noqa: N818 - a race, not a fault (RFC 9112, 9.3.1)
    """A kept-alive connection turned out to be closed: the node has not seen the request."""


class Broken(Exception):  # noqa: N818 - the answer, not us
    """The answer broke off after its head; ``kind`` says how in one word."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class NodeConnection(asyncio.Protocol):
    """One connection to a node, carrying one exchange at a time."""

    def __init__(self, home: deque[NodeConnection], idle_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._home = home
        self._idle_s = idle_s
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._deadline = 0.0
        self._alarm = Alarm(self._loop)
        self._patience_s = 0.0
        self._paused = False
        self.uses = 0
        self.url = ""  # of the node
        self._address = ""
        self._sent_at = 0.0
        self._reset()
        self._complete = True  # no exchange yet

    def _reset(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self._parts: list[bytes] = []
        self._size = 0
        self._head_size = 0
        self._heard = False  # any byte of this answer
        self._head_done = False
        self._sized = False
        self._keep_alive = False
        self._complete = False
        self._failure: Exception | None = None
        self._sink: Callable[[bytes], bool] | None = None

    # The exchange, from the forward path's side

    def send(self, request: bytes, body: bytes, patience_s: float) -> None:
        """Write the request; the answer's first byte may take ``patience_s``."""
        assert self._transport is not None  # noqa: S101 - made by create_connection
        self._reset()
        self.uses += 1
        self._sent_at = monotonic()
        self._patience_s = patience_s
        # A machine that died while its connection was idle closes nothing and answers nothing: an
        # early look tells it from one that thinks.
        self._arm(patience_s if self.uses == 1 else min(patience_s, _STALE_WITHIN_S))
        self._transport.write(request + body if len(body) < 65_536 else request)
        if len(body) >= 65_536:
            self._transport.write(body)

    def be_patient(self, patience_s: float) -> None:
        """Allow ``patience_s`` of silence from now on."""
        self._patience_s = patience_s
        self._arm(patience_s)

    async def head(self) -> None:
        """Wait for status and headers. Raises ``StaleConnection`` or ``Broken``."""
        while not self._head_done:
            if self._failure is not None:
                raise self._failure
            self._waiter = self._loop.create_future()
            await self._waiter

    async def read(self, sink: Callable[[bytes], bool] | None = None) -> bytes:
        """All body bytes that have come since the last read; b"" at the end.

        While this waits, ``sink`` is handed what comes, in the turn of the loop that brings it,
        and nobody is woken; with False it asks for a pause, and what comes next is returned.
        Raises ``Broken`` when the answer is cut, malformed or silent for too long.
        """
        while not self._parts:
            if self._complete:
                return b""
            if self._failure is not None:
                raise self._failure
            self._sink = sink  # only while nothing read before it waits to be sent
            self._waiter = self._loop.create_future()
            await self._waiter
        self._sink = None
        parts, self._parts, self._size = self._parts, [], 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
            self._arm(self._patience_s)  # the silence so far was ours, not the node's
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def complete(self) -> bool:
        """Whether the whole answer has arrived (parts of it may still be unread)."""
        return self._complete

    @property
    def sized(self) -> bool:
        """Whether the answer says where it ends; otherwise its end is the connection's."""
        return self._sized

    @property
    def unread(self) -> bool:
        """Whether body bytes wait to be read."""
        return bool(self._parts)

    def done(self) -> None:
        """End of the exchange: back to the pool when reusable, closed otherwise. Never waits."""
        if (
            self._complete
            and not self._parts
            and self._transport is not None
            and not self._transport.is_closing()
            and self._keep_alive
            and not self._transport.get_write_buffer_size()  # answered before all was asked
        ):
            self._arm(self._idle_s)
            self._home.append(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close at once, so that the node stops working for nobody."""
        self._alarm.stop()
        if self._transport is not None:
            self._transport.abort()

    @property
    def usable(self) -> bool:
        """Whether a pooled connection is still open, and its node's name still leads there."""
        return (
            self._transport is not None
            and not self._transport.is_closing()
            and not left(self.url, self._address)
        )

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, failure: Exception) -> None:
        if self._failure is None and not self._complete:
            self._failure = failure
            self._wake()  # what came before it is read first

    # Silence

    def _arm(self, seconds: float) -> None:
        self._deadline = self._loop.time() + seconds
        self._alarm.set(self._deadline, self._tick)

    def _tick(self, late: bool) -> None:
        now = self._loop.time()
        if self._paused or late or now < self._deadline:
            self._alarm.set(max(self._deadline, now + 0.05), self._tick)
            return
        rest_s = 0.0 if self._heard else self._patience_s - (monotonic() - self._sent_at)
        if self._complete or not self.uses:
            self.abort()  # idle in the pool for long enough
        elif rest_s > 0.01 and self.uses > 1 and self._unreached():
            self._fail(StaleConnection())
            for idle in [self, *self._home]:  # they lead to the same place
                idle.abort()
        elif rest_s > 0.01:
            self._arm(rest_s)
        else:
            kind = "stall" if self._heard else "first_byte_timeout"
            self._fail(Broken(kind, f"the node was silent for {self._patience_s:g} s"))
            self.abort()

    def _unreached(self) -> bool:
        """Whether nothing has come back since the request was sent, not even TCP's word that a
        part of it has arrived (``struct tcp_info`` of Linux; elsewhere nobody knows)."""
        if sys.platform != "linux" or self._transport is None:
            return False
        sock = self._transport.get_extra_info("socket")
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
        (unacknowledged,), (last_word_ms,) = _U32.unpack_from(info, 24), _U32.unpack_from(info, 56)
        waited_ms = (monotonic() - self._sent_at) * 1000
        return bool(unacknowledged) and last_word_ms >= waited_ms

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass
        self._address = str((transport.get_extra_info("peername") or ("",))[0])

    def data_received(self, data: bytes) -> None:
        if self._complete:  # nobody has asked: it must not be taken for the next answer
            self._keep_alive = False
            self.abort()
            return
        self._heard = True
        self._deadline = self._loop.time() + self._patience_s
        if not self._head_done:
            self._head_size += len(data)
        try:
            self._parser.feed_data(data)
            if not self._head_done and self._head_size > _HEAD_BYTES:
                raise httptools.HttpParserError("its head is too large")
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self._keep_alive = False
            if not self._complete:  # else it is what follows a whole answer
                self._fail(Broken("malformed", f"the node's answer is not valid HTTP: {exc}"))
                self.abort()
                return
        if self._sink is not None and self._parts:
            parts, self._parts, self._size = self._parts, [], 0
            if not self._sink(parts[0] if len(parts) == 1 else b"".join(parts)):
                self._sink = None
            if not self._complete:
                return
        if self._size > _READ_AHEAD_BYTES and not self._paused and not self._complete:
            self._paused = True
            assert self._transport is not None  # noqa: S101
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head_done and not self._sized and exc is None:
            self._complete = True  # an answer that ends by closing (HTTP/1.0 style)
            self._wake()
        stale = self.uses > 1 and not self._heard and monotonic() - self._sent_at < _STALE_WITHIN_S
        if stale:
            self._fail(StaleConnection())
        elif self._head_done:
            self._fail(Broken("truncated", f"the node broke off its answer: {exc or 'closed'}"))
        else:
            self._fail(Broken("reset", f"the node closed without an answer: {exc or 'closed'}"))
        self._alarm.stop()
        try:
            self._home.remove(self)
        except ValueError:
            pass

    # httptools callbacks

    def on_message_begin(self) -> None:
        if self._complete:
            raise httptools.HttpParserError("a second answer to one request")
        self.headers = []
        self._sized = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_done:
            return  # a trailer, which is no header (RFC 9110, 6.5.1)
        name = name.lower()
        if name == b"content-length":
            self._sized = True
        elif name == b"transfer-encoding":
            if value.strip().lower() != b"chunked":
                raise httptools.HttpParserError("the only Transfer-Encoding is chunked")
            self._sized = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 100 or self._parser.get_http_version() not in {"1.1", "1.0"}:
            raise httptools.HttpParserError("neither its version nor its status may be odd")
        if status >= 200:  # 1xx are only announcements (RFC 9110, 15.2)
            self.status = status
            self._sized = self._sized or status in {204, 304}
            # Asked here: after the message the parser has forgotten it.
            self._keep_alive = self._sized and self._parser.should_keep_alive()
            self._head_done = True

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._size += len(body)

    def on_message_complete(self) -> None:
        if self._head_done:
            self._complete = True
