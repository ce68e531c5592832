"""A small HTTP/1.1 server side on httptools that lets its owner misuse the socket.

One `Connection` serves one request at a time (pipelined ones wait). Whoever answers later than at
once registers as the connection's `exchange`, and is told when the client has left or reads again.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Protocol, cast
from urllib.parse import unquote

import httptools
import orjson

if TYPE_CHECKING:
    from collections.abc import Mapping

BODY_LIMIT: Final = 64 * 1024 * 1024
PIPELINE_LIMIT: Final = 16
_LINGER_ZERO: Final = struct.pack("ii", 1, 0)
_FLUSH_TRIES: Final = 100


@dataclass(slots=True)
class Request:
    """One request as it came. Header names are lower case."""

    method: str = ""
    path: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    keep_alive: bool = True
    http_1_1: bool = True
    """False for HTTP/1.0, which knows no chunks."""


class Exchange(Protocol):
    """An answer under way."""

    def abandoned(self) -> None:
        """The connection is gone; nothing can be sent any more."""

    def writable(self) -> None:
        """The client reads again after the write buffer was full."""


class Site(Protocol):
    """What a server serves."""

    connections: set[Connection]

    def refuses(self, method: str, path: str) -> bool:
        """Whether to reset this request as soon as its head is here."""

    def handle(self, request: Request, connection: Connection) -> None:
        """Answer at once, or set `connection.exchange` and answer later."""


class Connection(asyncio.Protocol):
    """One client connection."""

    def __init__(self, site: Site) -> None:
        self.exchange: Exchange | None = None
        self.paused = False
        """The write buffer is full: send nothing until `Exchange.writable`."""
        self._site = site
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._pending: deque[Request] = deque()
        self._keep_alive = True
        self._refused = False
        self._incoming = Request()
        self._url = b""
        self._body: list[bytes] = []
        self._body_size = 0

    # What an answer does -----------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Write bytes as they are."""
        if self._transport is not None:
            self._transport.write(data)

    def respond(
        self,
        status: int,
        payload: object,
        headers: Mapping[str, str] | None = None,
        *,
        content_type: str = "text/plain; charset=utf-8",
    ) -> None:
        """Send a whole answer: JSON, or bytes as they are, which `content_type` describes."""
        if isinstance(payload, bytes):
            kind, body = content_type, payload
        else:
            kind, body = "application/json", orjson.dumps(payload)
        length = {"Content-Length": str(len(body)), **(headers or {})}
        self.send(self.head(status, kind, length) + body)
        self.end()

    def head(self, status: int, content_type: str, headers: Mapping[str, str]) -> bytes:
        """Render status line and header fields for the request being served."""
        lines = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase if status in _KNOWN else 'Unknown'}",
            f"Content-Type: {content_type}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        if not self._keep_alive:
            lines.append("Connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def end(self, *, close: bool = False) -> None:
        """Mark the answer complete: close the connection or go on with the next request."""
        self.exchange = None
        if self._transport is None:
            return
        if close or not self._keep_alive:
            self._transport.close()
        elif self._pending:
            asyncio.get_running_loop().call_soon(self._serve_next)

    def reset(self) -> None:
        """Send RST now; what is still in the write buffer is lost. The exchange is told."""
        if self._transport is None:
            return
        sock = cast("socket.socket", self._transport.get_extra_info("socket"))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
        self._transport.abort()

    def reset_when_flushed(self, tries: int = _FLUSH_TRIES) -> None:
        """Send RST once what was written has left, or soon if the client does not read."""
        if self._transport is None:
            return
        if tries and (self._transport.get_write_buffer_size() or tries == _FLUSH_TRIES):
            # The loop writes at the end of its turn: look again in the next one.
            asyncio.get_running_loop().call_later(0.001, self.reset_when_flushed, tries - 1)
        else:
            self.reset()

    def abort(self) -> None:
        """Drop the connection; its exchange is told as if the client had left."""
        if self._transport is not None:
            self._transport.abort()

    # What the event loop calls -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._site.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - why does not matter
        self._transport = None
        self._pending.clear()
        self._site.connections.discard(self)
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.abandoned()

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if self.exchange is not None:
            self.exchange.writable()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._reject(400, "upgrade is not supported")
            return
        except httptools.HttpParserError:
            self._reject(400, "malformed HTTP request")
            return
        if self._refused:
            self.reset()
        elif self._body_size > BODY_LIMIT:
            self._reject(413, "request body too large")
        elif len(self._pending) > PIPELINE_LIMIT:
            self.reset()
        else:
            self._serve_next()

    def _reject(self, status: int, message: str) -> None:
        if self.exchange is not None:  # an answer is under way: no second one may follow it
            self.abort()
            return
        self._keep_alive = False
        self.respond(status, error_body(status, message))

    def _serve_next(self) -> None:
        while self._pending and self.exchange is None and self._is_open():
            request = self._pending.popleft()
            self._keep_alive = request.keep_alive
            self._site.handle(request, self)

    def _is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    # What the parser calls ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._incoming = Request()
        self._url = b""
        self._body = []
        self._body_size = 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._incoming.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        request = self._incoming
        request.method = self._parser.get_method().decode("ascii")
        request.path = unquote(httptools.parse_url(self._url).path.decode("ascii", "replace"))
        request.http_1_1 = self._parser.get_http_version() == "1.1"
        # A stream to an HTTP/1.0 client has no other end than the end of the connection.
        request.keep_alive = request.http_1_1 and self._parser.should_keep_alive()
        if self._site.refuses(request.method, request.path):
            self._refused = True
        elif request.headers.get("expect", "").lower() == "100-continue":
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_size += len(body)
        if self._body_size <= BODY_LIMIT:
            self._body.append(body)

    def on_message_complete(self) -> None:
        # Served after the parser has returned: it would report our own errors as bad requests.
        self._incoming.body = b"".join(self._body)
        self._body = []
        if self._body_size <= BODY_LIMIT:
            self._pending.append(self._incoming)


_KNOWN: Final = frozenset(int(status) for status in HTTPStatus)
_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """Build Anthropic's error shape, for the messages API."""
    kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_body(
    status: int, message: str, param: str | None = None, code: str | int | None = None
) -> dict[str, Any]:
    """Build the OpenAI error shape; without `code` it carries the status."""
    kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    detail = {"message": message, "type": kind, "param": param, "code": code or status}
    return {"error": detail}
