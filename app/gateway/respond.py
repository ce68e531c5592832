"""The client's side of an exchange, over ASGI: read the request, write the answer.

ASGI HTTP: https://asgi.readthedocs.io/en/latest/specs/www.html
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

import orjson

from app.errors import ApiError

if TYPE_CHECKING:
    from app.gateway.connection import Headers
    from app.gateway.listen import ClientProtocol

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ClientGone(Exception):  # noqa: N818 - not an error of ours
    """The client closed its connection before the answer was complete."""


class Client:
    """One request of one client.

    From ``watch`` on, a client that leaves cancels the serving task at its next await; the
    task finds ``gone`` set and ends. That stops the node at once, streaming or not.
    """

    __slots__ = ("_protocol", "_receive", "_send", "_serving", "gone", "headers", "raw_headers",
                 "started")  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.raw_headers: Headers = scope["headers"]
        self.headers = dict(reversed(self.raw_headers))  # of repeated headers, the first
        self._receive = receive
        self._send = send
        self._protocol: ClientProtocol = scope["extensions"]["leaseway"]
        self._serving: asyncio.Task[Any] | None = None
        self.gone = False
        self.started = False

    async def body(self, limit: int) -> bytes:
        """The whole request body. Raises ``ApiError`` 413 above ``limit``, or ``ClientGone``."""
        if int(self.headers.get(b"content-length", b"0") or 0) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def watch(self) -> None:
        """Cancel the current task when the client leaves. Call once the body is read.

        Raises ``ClientGone`` when it has left already.
        """
        if self._protocol.transport.is_closing():
            raise ClientGone
        self._serving = asyncio.current_task()
        self._protocol.on_gone = self._left

    def _left(self) -> None:
        self.gone = True
        if self._serving is not None:
            self._serving.cancel()

    def unwatch(self) -> None:
        """The answer is complete or given up: nobody to watch any more."""
        self._serving = None
        if self._protocol.on_gone == self._left:
            self._protocol.on_gone = None

    async def start(self, status: int, headers: Headers) -> None:
        """Send status and headers; from here on nothing can be retried."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        """Send a part of the body; waits while the client is slow."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def push(self, data: bytes) -> bool:
        """Send a part of a stream now, without waiting; False when the client is slow.

        For answers that were started without a length: the part is framed here (RFC 9112, 7.1).
        """
        protocol = self._protocol
        if data:
            protocol.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return not protocol.flow.write_paused

    async def finish(self, data: bytes = b"") -> None:
        """Send the last part; the answer is complete."""
        self.unwatch()  # or the server would report its own completion as a disconnect
        await self._send({"type": "http.response.body", "body": data})

    async def fail(self, error: ApiError, headers: Headers) -> None:
        """Answer with an error in the OpenAI shape."""
        body = error_body(error)
        lines: Headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *headers,
        ]
        if error.retry_after_s is not None:
            lines.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
        if error.allow is not None:
            lines.append((b"allow", error.allow.encode()))
        if error.status == 413:
            lines.append((b"connection", b"close"))  # the rest of the body is not read
        await self.start(error.status, lines)
        await self.finish(body)


def error_body(error: ApiError) -> bytes:
    """``{"error": {"message", "type", "param", "code"}}`` as bytes."""
    return orjson.dumps(
        {
            "error": {
                "message": error.message,
                "type": error.kind,
                "param": error.param,
                "code": error.code,
            }
        }
    )


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The body is larger than the limit of {limit} bytes (server.body_limit_mib).",
        kind="invalid_request_error",
        code="request_too_large",
    )
