"""One client connection of the load generator: sends, finds the end of the answer, judges it."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from time import perf_counter
from typing import cast

import httptools


@dataclass(frozen=True, slots=True)
class Exchange:
    """What each request sends, and the body length without which an answer is an error."""

    host: str
    port: int
    request: bytes
    answer_bytes: int


@dataclass(slots=True)
class Tally:
    """Counts and times of one run. Only whole, correct answers are requests."""

    first_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


class Lane(asyncio.Protocol):
    """Callbacks, not a coroutine per request: the generator shares a core with the backend."""

    _transport: asyncio.Transport

    def __init__(self, exchange: Exchange, tally: Tally) -> None:
        self._exchange = exchange
        self._tally = tally
        self._parser = httptools.HttpResponseParser(self)
        self._until = 0.0
        self._ended: asyncio.Future[None] | None = None
        self._busy = False
        self._sent_at = self._first_at = 0.0
        self._length = 0
        self.usable = False

    async def run(self, until: float) -> None:
        """Exchange after exchange until the clock passes `until`; always at least one."""
        self._until = until
        self._ended = asyncio.get_running_loop().create_future()
        self._send()
        await self._ended

    def close(self) -> None:
        """Give up the connection, and an answer that is still on its way with it."""
        self.usable = self._busy = False
        self._transport.abort()

    def _send(self) -> None:
        self._busy = True
        self._length = 0
        self._first_at = 0.0
        self._sent_at = perf_counter()
        self._transport.write(self._exchange.request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self.usable = True

    def data_received(self, data: bytes) -> None:
        if not self._first_at:
            self._first_at = perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail("malformed")

    def on_body(self, body: bytes) -> None:
        self._length += len(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if not self._busy:
            self._fail("answer to nothing")
        elif status != 200:
            self._fail(f"status {status}")
        elif self._length != self._exchange.answer_bytes:
            self._fail(f"length {self._length}, not {self._exchange.answer_bytes}")
        else:
            self._succeed(perf_counter())

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.usable = False
        if self._busy:
            self._fail("closed before the answer ended")

    def _succeed(self, now: float) -> None:
        self._tally.first_s.append(self._first_at - self._sent_at)
        self._tally.total_s.append(now - self._sent_at)
        self.usable = self._parser.should_keep_alive()
        if self.usable and now < self._until:
            self._send()
        else:
            self._end()

    def _fail(self, reason: str) -> None:
        """Nothing that follows a wrong answer on its connection can be trusted: hang up."""
        self._tally.errors[reason] += 1
        self.close()
        self._end()

    def _end(self) -> None:
        self._busy = False
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


async def open_lane(exchange: Exchange, tally: Tally) -> Lane | None:
    """A fresh connection, or None after counting the failure."""
    loop = asyncio.get_running_loop()
    try:
        _, lane = await loop.create_connection(
            lambda: Lane(exchange, tally), exchange.host, exchange.port
        )
    except OSError:
        tally.errors["connect"] += 1
        return None
    return lane
