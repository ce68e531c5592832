"""The listening side: uvicorn's HTTP protocol with two things more.

Given to uvicorn through its documented ``http=`` parameter. Head and body of a short answer leave
in one write, and a client that leaves is reported the moment its connection is lost, without a
task that waits for it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


_UPGRADE = re.compile(rb"(?i)\r\nupgrade:[^\r\n]*")


class ClientProtocol(HttpToolsProtocol):
    """One client connection. ``on_gone`` is called when it is lost while a request is served."""

    on_gone: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Put the corked transport between uvicorn and the socket."""
        super().connection_made(cast("asyncio.Transport", _Corked(transport, self.loop)))

    def connection_lost(self, exc: Exception | None) -> None:
        """Let uvicorn note it first, so that whoever is woken finds it noted."""
        super().connection_lost(exc)
        if self.on_gone is not None:
            self.on_gone()

    def data_received(self, data: bytes) -> None:
        """Take no offer of another protocol: httptools would drop the request's body for it."""
        if b"pgrade" in data and (self.cycle is None or self.cycle.response_complete):
            head, blank, body = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"", head) + blank + body
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Make the protocol known to the application."""
        super().on_message_begin()
        self.scope["extensions"] = {"leaseway": cast("dict[object, object]", self)}


class _Corked:
    """A transport that sends the head of an answer together with what follows in the same turn."""

    __slots__ = ("_head", "_loop", "_transport")

    def __init__(self, transport: asyncio.BaseTransport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._loop = loop
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send ``data``; a head waits for its first part until the turn of the loop ends."""
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1."):
            self._head = data
            self._loop.call_soon(self._flush)
            return
        if not self._transport.is_closing():  # the client may have left within this turn
            self._transport.write(data)

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)

    def close(self) -> None:
        """Close after what was written."""
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether the connection is closed or about to be."""
        return self._transport.is_closing()
