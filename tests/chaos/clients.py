"""Clients of the cluster: raw asyncio, one connection for each request, some leave early."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from time import monotonic
from typing import TYPE_CHECKING, Final, cast

import httptools

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DEADLINE_S: Final = 30.0
PATH: Final = "/v1/chat/completions"
_LEAVES: Final = 0.15
_LONG: Final = 0.04
_PAUSE_S: Final = 0.6


@dataclass(slots=True)
class Exchange:
    """One request and what came of it; times on the clock of ``monotonic``."""

    number: int
    replica: str
    body: bytes
    stream: bool
    started: float
    sent: float = 0.0
    first_byte: float = 0.0
    ended: float = 0.0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    answer: bytes = b""
    complete: bool = False
    """The answer has ended as its framing says."""
    broken: str = ""
    """How the connection ended without a complete answer."""
    left: bool = False
    """The client went away by itself."""
    hung: bool = False
    """Nothing ended it before the deadline."""
    neighbours: int = 0
    """Requests open on the same replica when it ended, itself included."""

    def __str__(self) -> str:
        return (
            f"c{self.number} {self.replica} {'stream' if self.stream else 'json'} "
            f"{self.ended - self.started:.2f}s status {self.status} node "
            f"{self.headers.get('x-leaseway-node', '-')} attempts "
            f"{self.headers.get('x-leaseway-attempts', '-')} {self.broken} "
            f"…{self.answer[-160:]!r}"
        )


class _Wire(asyncio.Protocol):
    """The connection of one exchange."""

    def __init__(self, request: bytes, exchange: Exchange) -> None:
        self._request = request
        self._exchange = exchange
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self.transport: asyncio.Transport | None = None
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass
        self.transport.write(self._request)
        self._exchange.sent = monotonic()

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        exchange.first_byte = exchange.first_byte or monotonic()
        if exchange.complete:
            exchange.broken = f"bytes after the end: {data[:80]!r}"
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._end(f"malformed: {exc}")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._exchange.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self._exchange.complete = True
        self._end("")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"{type(exc).__name__}: {exc}" if exc else "closed")

    def _end(self, broken: str) -> None:
        if not self.done.done():
            self.keep()
            self._exchange.broken = broken
            self.done.set_result(None)

    def keep(self) -> None:
        """Write down what has come so far."""
        self._exchange.answer = b"".join(self._parts)


async def carry_out(
    exchange: Exchange,
    port: int,
    request: bytes,
    *,
    leave_after_s: float | None = None,
    deadline_s: float = DEADLINE_S,
) -> Exchange:
    """Send the request and see it through to its end, or leave. Never raises."""
    loop, wire = asyncio.get_running_loop(), None
    patience = deadline_s if leave_after_s is None else leave_after_s
    try:
        async with asyncio.timeout(patience):
            _, wire = await loop.create_connection(
                lambda: _Wire(request, exchange), "127.0.0.1", port
            )
            await asyncio.shield(wire.done)
    except TimeoutError:
        exchange.left, exchange.hung = leave_after_s is not None, leave_after_s is None
    except OSError as exc:
        exchange.broken = f"connect: {type(exc).__name__}"
    exchange.ended = monotonic()
    if wire is not None:
        wire.keep()
        assert wire.transport is not None
        wire.transport.abort()
    return exchange


def _post(path: str, body: bytes, request_id: str) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: chaos\r\ncontent-type: application/json\r\n"
        f"x-request-id: {request_id}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _tokens(chance: Random, *, stream: bool) -> int:
    if not stream:
        return chance.randint(1, 20)
    # A few streams outlive the lease ttl, and so whatever takes a lease away meanwhile.
    return 150 if chance.random() < _LONG else chance.randint(1, 60)


async def get(port: int, path: str, deadline_s: float = 5.0) -> tuple[int, bytes]:
    """GET a page: status and body; status 0 when there was no complete answer."""
    request = f"GET {path} HTTP/1.1\r\nhost: chaos\r\n\r\n".encode()
    return await _page(port, request, deadline_s)


async def post(port: int, path: str, body: bytes) -> tuple[int, bytes]:
    """POST JSON to a page: as ``get``."""
    return await _page(port, _post(path, body, "chaos"), 5.0)


async def _page(port: int, request: bytes, deadline_s: float) -> tuple[int, bytes]:
    exchange = Exchange(0, "", b"", stream=False, started=monotonic())
    await carry_out(exchange, port, request, deadline_s=deadline_s)
    return (exchange.status if exchange.complete else 0), exchange.answer


class Load:
    """Users over all replicas. Every exchange that ends is handed to ``judge``."""

    def __init__(
        self, ports: Mapping[str, int], seed: int, judge: Callable[[Exchange], None]
    ) -> None:
        self._ports = ports
        self._seed = seed
        self._judge = judge
        self._numbers = 0
        self._open: Counter[str] = Counter()
        self._stopping = False

    async def run(self, users: int) -> None:
        """Until ``stop``; returns when the last request has ended."""
        async with asyncio.TaskGroup() as group:
            for user in range(users):
                group.create_task(self._user(Random(self._seed * 10_000 + user)))

    def stop(self) -> None:
        """No new requests."""
        self._stopping = True

    async def _user(self, chance: Random) -> None:
        while not self._stopping:
            await self.one(chance, leaves=chance.random() < _LEAVES)
            await asyncio.sleep(chance.uniform(0, _PAUSE_S))

    async def one(
        self, chance: Random, *, leaves: bool = False, tokens: int | None = None
    ) -> Exchange:
        """One request to a drawn replica, of a drawn size unless ``tokens`` says it."""
        self._numbers += 1
        stream = chance.random() < 0.7
        replica = chance.choice(sorted(self._ports))
        fields = {
            "model": "demo",
            "stream": stream,
            "max_tokens": tokens or _tokens(chance, stream=stream),
            "messages": [{"role": "user", "content": f"{self._numbers} " * chance.randint(1, 50)}],
        }
        body = json.dumps(fields).encode()
        exchange = Exchange(self._numbers, replica, body, stream, monotonic())
        self._open[replica] += 1
        await carry_out(
            exchange,
            self._ports[replica],
            _post(PATH, body, f"c{self._numbers}"),
            leave_after_s=chance.uniform(0, 1.5) if leaves else None,
        )
        exchange.neighbours = self._open[replica]
        self._open[replica] -= 1
        self._judge(exchange)
        return exchange
