"""The client's side of an exchange: one request as it comes in, its answer as it goes out.

Made by ``listen.py`` when the head of a request is complete, and served by ``path.py``.
HTTP/1.1: RFC 9112.
"""

from __future__ import annotations

import asyncio
import math
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from app.errors import ApiError
from app.gateway.shape import Shape, error_body

if TYPE_CHECKING:
    from app.gateway.connection import Headers
    from app.gateway.listen import ClientProtocol

_STATUS_LINES = {
    int(status): b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus
}


class ClientGone(Exception):  # noqa: N818 - not an error of ours
    """The client closed its connection before the answer was complete."""


class Client:
    """One request of one client.

    From ``watch`` on, a client that leaves cancels the serving task at its next await; the
    task finds ``gone`` set and ends. That stops the node at once, streaming or not.
    ``extra`` headers go out with the answer, whatever it is.
    """

    __slots__ = (
        "_body", "_chunked", "_connection", "_fault", "_head", "_serving", "_silent", "_waiter",
        "extra", "finished", "gone", "headers", "http_1_1", "keep_alive", "length",
        "limit", "method", "path", "query", "raw_headers", "received", "sent", "shape", "size",
        "started", "status", "unsized", "wants_continue",
    )  # fmt: skip

    def __init__(
        self,
        connection: ClientProtocol,
        method: str = "",
        path: str = "",
        query: bytes = b"",
        headers: Headers | None = None,
        *,
        http_1_1: bool = True,
        keep_alive: bool = False,
    ) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.raw_headers: Headers = headers or []
        self.headers = dict(reversed(self.raw_headers))  # of repeated headers, the first
        self.http_1_1 = http_1_1
        self.keep_alive = keep_alive
        self.shape = Shape.OPENAI
        self.extra: Headers = []
        self.received = False  # the whole request has come in
        self.length = 0  # of the body, where the head tells
        self.size = 0  # of the body so far
        self.limit = 0  # of the body
        self.gone = False
        self.status = 0  # of the answer
        self.sent = 0  # bytes of it, head and framing too
        self.started = False
        self.finished = False
        self.wants_continue = False
        self.unsized = False  # nothing but the close tells where the answer ends
        self._connection = connection
        self._body: bytes | bytearray = b""
        self._fault: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._serving: asyncio.Task[Any] | None = None
        self._head = b""  # goes out together with what follows it
        self._chunked = False
        self._silent = method == "HEAD"

    # The request, as the connection brings it

    def take(self, data: bytes) -> None:
        """A part of the body has come. Raises ``ApiError`` when it is too large."""
        self.size += len(data)
        if self.size > self.limit:
            raise _too_large(self.limit)
        if self.finished or self._fault is not None:
            return  # nobody will read it
        if not self._body:
            self._body = data
        else:
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += data

    def complete(self) -> None:
        """The request is whole."""
        self.received = True
        self._wake()

    def broken(self, error: ApiError) -> None:
        """The request cannot be had: whoever wants it is told, and it is the connection's last."""
        self._fault = error
        self.keep_alive = False
        self._body = b""
        self._wake()

    def lost(self) -> None:
        """The client has left."""
        self.gone = True
        self._wake()
        if self._serving is not None:
            self._serving.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # The request, as the serving task reads it

    @property
    def refused(self) -> bool:
        """Whether what came was no request at all."""
        return not self.method

    def check(self) -> None:
        """Raises ``ApiError`` when it is known already that the request cannot be had."""
        if self._fault is not None:
            raise self._fault

    async def body(self) -> bytes:
        """The whole body, once. Raises ``ApiError`` (400, 408, 413) or ``ClientGone``."""
        if self.length > self.limit:
            self.broken(_too_large(self.limit))
        self.check()
        if self.wants_continue and not self.received:
            self.wants_continue = False
            self._connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not self.received:
            await self.changed()
            if self.gone:
                raise ClientGone
            self.check()
        body, self._body = self._body, b""
        return bytes(body)

    async def changed(self) -> None:
        """Wait until the body is complete or broken, or the client gone."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def watch(self) -> None:
        """Cancel the current task when the client leaves. Call once the body is read.

        Raises ``ClientGone`` when it has left already.
        """
        if self.gone or self._connection.closing:
            raise ClientGone
        self._serving = asyncio.current_task()

    def unwatch(self) -> None:
        """The answer is complete or given up: nobody to watch any more."""
        self._serving = None

    @property
    def peer(self) -> Any:
        """The client's address."""
        return self._connection.peer

    @property
    def app_state(self) -> dict[str, Any]:
        """What the lifespan of the control plane has left for its requests."""
        return self._connection.app_state

    # The answer

    async def start(self, status: int, headers: Headers) -> None:
        """Begin the answer; from here on nothing can be retried. It leaves with what follows."""
        self.started = True
        self.status = status
        if self.wants_continue and not self.received:
            self.keep_alive = False  # nobody knows whether the body will still come
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        sized = self._silent or status in {204, 304}
        for name, value in (*self._connection.default_headers, *self.extra, *headers):
            if name == b"content-length":
                sized = True
            lines += (name, b": ", value, b"\r\n")
        if not sized and self.http_1_1:
            self._chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        self.unsized = not sized and not self.http_1_1
        lines.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        self._head = b"".join(lines)

    def push(self, data: bytes) -> bool:
        """Send a part of the body now, without waiting; False when the client is slow."""
        if self._silent:
            data = b""
        elif self._chunked and data:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._head:
            data, self._head = self._head + data, b""
        connection = self._connection
        if data:
            self.sent += len(data)
            connection.send(data)
        return not connection.slow

    async def write(self, data: bytes) -> None:
        """Send a part of the body; waits while the client is slow."""
        if not self.push(data):
            await self._connection.drained()

    async def finish(self, data: bytes = b"") -> None:
        """Send the last part; the answer is complete."""
        self.unwatch()
        if self._silent:
            data = b""
        elif self._chunked:
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
        data = self._head + data if self._head else data
        self.sent += len(data)
        self._connection.send(data)
        self._head = b""
        self.finished = True
        self._wake()
        self._connection.answered(self)

    async def fail(self, error: ApiError, headers: Headers) -> None:
        """Answer with an error in the shape of the route."""
        body = error_body(error, self.shape)
        lines: Headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *headers,
            *error.headers,
        ]
        if error.retry_after_s is not None:
            lines.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
        if error.allow is not None:
            lines.append((b"allow", error.allow.encode()))
        await self.start(error.status, lines)
        await self.finish(body)


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The body is larger than the limit of {limit} bytes (server.body_limit_mib).",
        kind="invalid_request_error",
        code="request_too_large",
    )
