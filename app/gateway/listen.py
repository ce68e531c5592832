"""The listening side: one client connection, from its bytes to requests and back.

Given to uvicorn through its documented ``http=`` parameter, in place of its own protocol: that
one lets pass what a proxy must refuse (trailers become headers, a coding before ``chunked`` is
lost, HTTP/1.0 clients get chunks), knows no limit on heads and slow senders, and answers a
malformed request in the middle of another one's answer. llhttp, through httptools, parses; its
strictness is what the tests of framing rely on. HTTP/1.1: RFC 9112.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import struct
from collections import deque
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast
from urllib.parse import unquote

import httptools

from app.errors import ApiError, bad_request
from app.gateway.alarm import Alarm
from app.gateway.respond import Client

if TYPE_CHECKING:
    import uvicorn
    from uvicorn.server import ServerState

    from app.gateway.connection import Headers

log = logging.getLogger("leaseway.listen")

_HEAD_BYTES = 64 * 1024
_MOST_HEADERS = 128
# Frames of chunks, their extensions and trailers may add this to a body: a fixed part, and a
# factor that chunks of one byte need.
_OVERHEAD_BYTES, _OVERHEAD_FACTOR = 64 * 1024, 16
# What a client may send ahead of the answer that it waits for.
_MOST_WAITING, _WAITING_BYTES = 16, 1024 * 1024
_LINGER_S = 5.0  # for so long an answer that ends the connection is kept from being reset
_UPGRADE = re.compile(rb"(?im)^upgrade:[^\r\n]*\r\n")
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s (socket(7))


class Bounds(NamedTuple):
    """What a client may cost before it is known: bytes of a body, seconds of a head, and of
    silence within a body."""

    body_bytes: int
    head_s: float
    body_s: float


class Application(Protocol):
    """Who serves the requests."""

    bounds: Bounds

    async def serve(self, client: Client) -> None:
        """Answer one request."""


class ClientProtocol(asyncio.Protocol):
    """One client connection.

    Requests are served one after the other: those that were sent ahead wait in ``_waiting``.
    ``_reading`` is the request whose body comes in, ``_serving`` the one that is answered; they
    can be the same. A head is coming in when ``_in_head``. Once ``_deaf``, whatever still comes
    is dropped.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._app = cast("Application", config.loaded_app)
        self._bounds = self._app.bounds
        self._keep_alive_s = config.timeout_keep_alive
        self._state = server_state
        self.app_state = app_state
        self._loop = _loop or asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._alarm = Alarm(self._loop)
        self._drain: asyncio.Future[None] | None = None
        self._serving: Client | None = None
        self._reading: Client | None = None
        self._waiting: deque[Client] = deque()
        self._url = b""
        self._headers: Headers = []
        self._in_head = False
        self._past_first_line = False
        self._held = b""  # the unfinished line of a head
        self._raw_bytes = 0  # of the head, or of the body with its framing
        self._since = 0.0  # when the head began, or the connection was last of use
        self._paused = False
        self._deaf = False
        self._leaving = False
        self.slow = False

    # What the serving side uses

    @property
    def default_headers(self) -> Headers:
        """Headers of every answer (Date)."""
        return self._state.default_headers

    @property
    def closing(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._transport.is_closing()

    @property
    def peer(self) -> Any:
        """The client's address."""
        return self._transport.get_extra_info("peername")

    def send(self, data: bytes) -> None:
        """Write, unless the client has gone within this turn of the loop."""
        if not self._transport.is_closing():
            self._transport.write(data)

    async def drained(self) -> None:
        """Wait until the client has taken what was sent, or has gone."""
        if self.slow:
            self._drain = self._loop.create_future()
            await self._drain

    def answered(self, client: Client) -> None:
        """The answer of the request being served is complete: go on with the next one."""
        self._state.total_requests += 1
        self._serving = None
        if self._transport.is_closing():
            return
        if not client.keep_alive:
            self._close()
        elif self._waiting:
            self._start(self._waiting.popleft())
        elif self._leaving:
            self._transport.close()
        else:
            self._since = self._since if self._in_head else self._loop.time()
            self._arm(self._due())

    def shutdown(self) -> None:
        """uvicorn ends: close now, or after the answers that are due."""
        self._leaving = True
        if self._serving is None:
            self._transport.close()
        else:
            (self._waiting[-1] if self._waiting else self._serving).keep_alive = False

    # One request after the other

    def _enqueue(self, client: Client) -> None:
        if self._serving is None:
            self._start(client)
        else:
            self._waiting.append(client)

    def _start(self, client: Client) -> None:
        self._serving = client
        if self._paused:
            self._paused = False
            self._since = self._loop.time()  # the silence so far was ours
            self._transport.resume_reading()
            self._arm(self._due())
        task = self._loop.create_task(self._serve(client))
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    async def _serve(self, client: Client) -> None:
        try:
            await self._app.serve(client)
        except Exception:
            log.exception("an answer was cut off by a fault of the gateway")
        finally:
            if not client.finished:
                self._cut(client)

    def _cut(self, client: Client) -> None:
        """End an answer unfinished, so that the client can tell."""
        self._deaf = True
        if client.started:
            client.push(b"")
        if client.unsized and not self._transport.is_closing():
            # The close would be its proper end.
            sock: socket.socket = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self._transport.abort()
        else:
            self._transport.close()

    def _close(self) -> None:
        """Close after the answer. A client that is still sending must be able to read it: a
        close now would reset the connection (RFC 9112, 9.6)."""
        whole = self._reading is None and not self._deaf
        self._deaf, self._in_head = True, False
        self._waiting.clear()
        if whole or not self._transport.can_write_eof():
            self._transport.close()
        else:
            self._transport.write_eof()
            self._since = self._loop.time()
            self._arm(self._due())

    def _refuse(self, error: ApiError) -> None:
        """What comes in cannot be a request: say so after the answers that are due, and close."""
        self._deaf = True
        self._in_head = False
        reading = self._reading
        if reading is None:
            client = Client(self)
            client.broken(error)
            self._enqueue(client)
        elif reading.finished:
            self._close()
        else:
            reading.broken(error)

    # Patience with the client

    def _due(self) -> float:
        """When patience ends in the present state."""
        if self._paused:
            return inf
        if self._in_head:
            return self._since + self._bounds.head_s
        if self._reading is not None and not self._deaf:
            return self._since + self._bounds.body_s
        if self._serving is not None:
            return inf
        return self._since + (_LINGER_S if self._deaf else self._keep_alive_s)

    def _arm(self, due: float) -> None:
        if due != inf:
            self._alarm.set(due, self._tick)

    def _tick(self, late: bool) -> None:
        now, due = self._loop.time(), self._due()
        if late:
            due = max(due, now + 0.05)
        if now < due:
            self._arm(due)
        elif self._in_head:
            self._refuse(_too_slow("headers", self._bounds.head_s))
        elif self._reading is not None and not self._deaf:
            self._refuse(_too_slow("body", self._bounds.body_s))
        elif self._deaf:
            self._transport.abort()
        else:
            self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass
        self._state.connections.add(cast("Any", self))
        self._since = self._loop.time()
        self._arm(self._due())

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - gone is gone
        self._state.connections.discard(cast("Any", self))
        self._deaf = True
        self._waiting.clear()
        self._alarm.stop()
        self._parser = cast("httptools.HttpRequestParser", None)  # it refers to us
        self.resume_writing()
        if self._serving is not None:
            self._serving.lost()

    def pause_writing(self) -> None:
        self.slow = True

    def resume_writing(self) -> None:
        self.slow = False
        if self._drain is not None and not self._drain.done():
            self._drain.set_result(None)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        try:
            if self._reading is not None:
                self._since = self._loop.time()
                self._raw_bytes += len(data)
            elif self._in_head or data.strip(b"\r\n"):
                data = self._head_part(data)
            else:
                return  # an empty line between requests (RFC 9112, 2.2)
            self._parser.feed_data(data)
            if self._held and not self._in_head:  # it was no line of the head
                data, self._held = self._held, b""
                self._parser.feed_data(data)
            self._check_overhead()
        except ApiError as error:
            self._refuse(error)
        except httptools.HttpParserError as exc:
            told = exc.__context__
            self._refuse(told if isinstance(told, ApiError) else _malformed(str(exc)))
        if self._in_head or self._reading is not None:
            self._arm(self._due())
            self._pause_if_ahead()

    def _head_part(self, data: bytes) -> bytes:
        """Whole lines of a head, without ``Upgrade``; raises ``ApiError`` when it is too large.

        An offer of another protocol is not taken (RFC 9110, 7.8), and would make the parser
        drop the request's body.
        """
        if not self._in_head:
            self._in_head, self._past_first_line = True, False
            self._raw_bytes, self._since = 0, self._loop.time()
        if self._held:
            data, self._held = self._held + data, b""
        empty_line = self._past_first_line and data.startswith(b"\r\n")
        end = 2 if empty_line else data.find(b"\r\n\r\n") + 4
        if end == 3:
            end = data.rfind(b"\n") + 1
            if end or self._past_first_line:
                data, self._held = data[:end], data[end:]
            end = len(data)
        if self._raw_bytes + end + len(self._held) > _HEAD_BYTES:
            raise _head_too_large()
        self._raw_bytes += end
        self._past_first_line = self._past_first_line or b"\n" in data
        head = data[:end]
        if b"pgrade" in head or b"PGRADE" in head:
            data = _UPGRADE.sub(b"", head) + data[end:]
        return data

    def _check_overhead(self) -> None:
        reading = self._reading
        if (
            reading is not None
            and self._raw_bytes > _OVERHEAD_BYTES + _OVERHEAD_FACTOR * reading.size
        ):
            raise _malformed("its chunks carry too little")

    def _pause_if_ahead(self) -> None:
        """Read no more from a client that is far ahead of its answers."""
        ahead = self._waiting and (
            len(self._waiting) >= _MOST_WAITING or self._waiting[-1].size > _WAITING_BYTES
        )
        if ahead and not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    # httptools callbacks; an ApiError raised in one is the context of what feed_data raises

    def on_message_begin(self) -> None:
        if not self._in_head:  # right behind another request
            self._in_head, self._past_first_line = True, False
            self._raw_bytes, self._since = 0, self._loop.time()
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading is None:  # else it is a trailer, which is no header (RFC 9110, 6.5.1)
            self._headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        method, version = self._parser.get_method().decode(), self._parser.get_http_version()
        if self._parser.should_upgrade():  # of a request sent ahead of an answer, or CONNECT
            raise _malformed("no other protocol is spoken here")
        headers = self._headers
        length, wants_continue = _checked(version, headers)
        path, query = _target(self._url)
        http_1_1 = version == "1.1"
        client = Client(
            self, method, path, query, headers,
            http_1_1=http_1_1, keep_alive=http_1_1 and self._parser.should_keep_alive(),
        )  # fmt: skip
        client.limit, client.length = self._bounds.body_bytes, length
        client.wants_continue = http_1_1 and wants_continue
        self._in_head, self._raw_bytes = False, 0
        self._reading = client
        self._enqueue(client)

    def on_body(self, body: bytes) -> None:
        assert self._reading is not None  # noqa: S101 - a body follows a head
        self._reading.take(body)

    def on_message_complete(self) -> None:
        if self._reading is not None:
            self._reading.complete()
            self._reading = None


def _checked(version: str, headers: Headers) -> tuple[int, bool]:
    """The length told by a head and whether it expects ``100 Continue``.

    Raises ``ApiError`` for what the parser lets pass and two readers might read differently.
    """
    if version not in {"1.1", "1.0"}:
        raise ApiError(
            505,
            "The gateway speaks HTTP/1.1.",
            kind="invalid_request_error",
            code="http_version_not_supported",
        )
    if len(headers) > _MOST_HEADERS:
        raise _head_too_large()
    length = hosts = 0
    wants_continue = False
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            length = int(value)
        elif name == b"transfer-encoding" and (
            value.strip().lower() != b"chunked" or version == "1.0"
        ):
            raise _malformed("the only Transfer-Encoding is chunked, and HTTP/1.0 has none")
        elif name == b"expect":
            wants_continue = value.strip().lower() == b"100-continue"
    if hosts != 1 and (hosts or version == "1.1"):
        raise _malformed("a request names one Host")
    return length, wants_continue


def _target(url: bytes) -> tuple[str, bytes]:
    """Path, decoded, and query, as it came, of a request target (RFC 9112, 3.2)."""
    if url[:1] == b"/":
        if b"#" in url:
            raise _malformed("a target has no fragment")
        raw, _, query = url.partition(b"?")
    elif url == b"*":
        raw, query = url, b""
    else:
        try:
            parts = httptools.parse_url(url)
        except httptools.HttpParserInvalidURLError:
            raise _malformed("its target is no URL") from None
        if not parts.schema or parts.fragment:
            raise _malformed("its target is no URL of a resource")
        raw, query = parts.path or b"/", parts.query or b""
    path = raw.decode("latin-1")
    return unquote(path) if "%" in path else path, query


def _malformed(why: str) -> ApiError:
    return bad_request(f"The request is not valid HTTP: {why}.", code="malformed_request")


def _head_too_large() -> ApiError:
    return ApiError(
        431,
        f"The request's head is larger than {_HEAD_BYTES} bytes or {_MOST_HEADERS} headers.",
        kind="invalid_request_error",
        code="headers_too_large",
    )


def _too_slow(what: str, limit_s: float) -> ApiError:
    return ApiError(
        408,
        f"The request's {what} did not come within {limit_s:g} s.",
        kind="invalid_request_error",
        code="request_timeout",
    )
