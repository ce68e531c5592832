"""The way to the nodes: keep-alive connections, one pool of idle ones per node.

httpx polls every idle connection on each request and costs 30 times as much (measured), so the
forward path has a client of its own; everything else uses httpx.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from app.errors import AttemptFailed
from app.gateway.connection import Broken, Headers, NodeConnection, StaleConnection
from app.model import Node, Outcome

if TYPE_CHECKING:
    from app.config import Timeouts


@dataclass(frozen=True, slots=True)
class _Address:
    """Where a node's URL leads: what to dial and what to say."""

    host: str
    port: int
    tls: bool
    authority: bytes
    base: bytes


class Forward:
    """Opens exchanges with nodes. One per replica."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._idle: dict[str, deque[NodeConnection]] = {}
        self._addresses: dict[str, _Address] = {}
        self._tls: ssl.SSLContext | None = None

    async def open(
        self, node: Node, method: bytes, target: bytes, headers: Headers, body: bytes
    ) -> NodeConnection:
        """Send a request to ``node`` and wait for the head of the answer.

        ``target`` is path and query; ``headers`` are end-to-end, without ``host`` and
        ``content-length``, which are this hop's. Raises ``AttemptFailed``.
        """
        address = self._addresses.get(node.url) or self._resolve(node.url)
        lines = [method, b" ", address.base, target, b" HTTP/1.1\r\nhost: ", address.authority]
        for name, value in headers:
            lines += (b"\r\n", name, b": ", value)
        lines.append(b"\r\ncontent-length: %d\r\n\r\n" % len(body))
        request = b"".join(lines)
        idle = self._idle.setdefault(node.url, deque())
        while True:
            connection = self._reuse(idle) or await self._connect(node, address, idle)
            try:
                connection.send(request, body, self._timeouts.first_token_s)
                await connection.head()
                return connection
            except StaleConnection:
                continue  # never reached the node: again, in the end on a fresh connection
            except Broken as exc:
                connection.abort()
                raise AttemptFailed(Outcome.FAILED, exc.kind, f"node {node.id}: {exc}") from exc
            except BaseException:
                connection.abort()
                raise

    def _reuse(self, idle: deque[NodeConnection]) -> NodeConnection | None:
        while idle:
            connection = idle.pop()  # the most recently used is the least likely to be stale
            if connection.usable:
                return connection
        return None

    async def _connect(
        self, node: Node, address: _Address, idle: deque[NodeConnection]
    ) -> NodeConnection:
        if address.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeouts.connect_s):
                _, connection = await loop.create_connection(
                    lambda: NodeConnection(idle, self._timeouts.node_idle_s),
                    address.host,
                    address.port,
                    ssl=self._tls if address.tls else None,
                )
        except TimeoutError as exc:
            raise AttemptFailed(
                Outcome.FAILED,
                "connect_timeout",
                f"node {node.id}: no connection in {self._timeouts.connect_s:g} s",
            ) from exc
        except OSError as exc:
            raise AttemptFailed(
                Outcome.FAILED, "connect", f"node {node.id}: cannot connect: {exc.strerror or exc}"
            ) from exc
        return connection

    def _resolve(self, url: str) -> _Address:
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        address = _Address(
            host=parts.hostname or "",
            port=parts.port or (443 if tls else 80),
            tls=tls,
            authority=parts.netloc.encode("idna" if not parts.netloc.isascii() else "ascii"),
            base=parts.path.encode(),
        )
        self._addresses[url] = address
        return address

    def close(self) -> None:
        """Close every idle connection."""
        for idle in self._idle.values():
            for connection in list(idle):
                connection.abort()
        self._idle.clear()
