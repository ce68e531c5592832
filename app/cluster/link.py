"""One multiplexed Redis connection for the scripts: every call is one write and one reply.

Replies come in the order of the calls, so a FIFO of waiters is all the bookkeeping there is.
A waiter that is cancelled or times out keeps its place in the line: its reply is read and
dropped, and the next caller gets its own (redis-py#2665). Nothing is ever sent twice by the
link; whoever calls decides what a lost answer means.

A pool of connections would cost several times as much per call, and either fails or queues
above its size. Where to dial is redis-py's business (``address.py``); TLS, ACL users and
database numbers work.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import hiredis

from app.cluster.address import Address, Resolver
from app.errors import RedisAway, ScriptError
from app.keys import dial_key

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("leaseway.redis")

Argument = str | bytes | int | float

# Replies that say "not a usable primary": the address is resolved and dialled again.
_ELSEWHERE = ("READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "MOVED", "ASK", "MISCONF")
_BACKOFF_FIRST_S = 0.05
_BACKOFF_MAX_S = 0.5  # two dials a second cost nothing; a second without shared state does
_TIMEOUTS_TO_DROP = 3


class NoScript(ScriptError):  # noqa: N818 - Redis' own word
    """The server does not know the digest: send the source."""


class NotSent(RedisAway):
    """There is no connection: the call has not left, so nothing can have come of it."""


def _pack(command: tuple[Argument, ...]) -> bytes:
    packed: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]  # stub: a 1-tuple
    return packed


class _Wire(asyncio.Protocol):
    """The socket of one connection: hiredis on the way in, a FIFO of waiters beside it."""

    def __init__(self, lost: Callable[[_Wire, str], None]) -> None:
        self.waiters: deque[tuple[asyncio.Future[Any], float]] = deque()
        self.transport: asyncio.Transport | None = None
        self._reader = hiredis.Reader(encoding="utf-8", errors="replace")
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._out: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not False:
                self._settle(reply)
        except (hiredis.ProtocolError, IndexError) as exc:
            self.drop(f"broken reply: {exc}")

    def _settle(self, reply: Any) -> None:
        waiter, _ = self.waiters.popleft()
        error = isinstance(reply, hiredis.ReplyError)
        if error and str(reply).startswith(_ELSEWHERE):
            # Everybody behind would hear the same: leave this server, dial again.
            self.waiters.appendleft((waiter, 0.0))
            self.drop(str(reply))
        elif waiter.done():
            return
        elif not error:
            waiter.set_result(reply)
        elif str(reply).startswith("NOSCRIPT"):
            waiter.set_exception(NoScript(str(reply)))
        else:
            waiter.set_exception(ScriptError(str(reply)))

    def send(self, packed: bytes, waiter: asyncio.Future[Any], deadline: float) -> None:
        assert self.transport is not None  # noqa: S101 - only a connected wire is handed out
        self.waiters.append((waiter, deadline))
        if not self._out:  # calls of one turn of the loop leave in one write
            self._loop.call_soon(self._flush)
        self._out.append(packed)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(out[0] if len(out) == 1 else b"".join(out))

    def drop(self, reason: str) -> None:
        """Close at once; every waiter hears that Redis is away."""
        if self.transport is not None:
            self.transport.abort()
        self._fail(reason)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(str(exc) if exc else "connection closed by Redis")

    def _fail(self, reason: str) -> None:
        waiters, self.waiters = self.waiters, deque()
        for waiter, _ in waiters:
            if not waiter.done():
                waiter.set_exception(RedisAway(reason))
        self._lost(self, reason)


class Link:
    """The way to Redis for everything per request.

    ``budget_s`` is the whole time one call may take; after it the caller gets ``RedisAway``.
    Three calls in a row that time out, or a server that is no writable primary, drop the
    connection; while there is none, calls fail at once instead of waiting (the guard), and one
    task dials with exponential back-off and jitter.
    """

    def __init__(self, url: str, *, budget_s: float, name: str, tag: str = "default") -> None:
        self._resolver = Resolver(url, tag=tag, timeout_s=max(budget_s, 0.5))
        self.address = self._resolver.shown
        self._budget_s = budget_s
        self._name = name
        # Of the pool's slot, and never there: a write to it shows what a first script would meet.
        self._trial_key = dial_key(tag)
        self._wire: _Wire | None = None
        self._dialling: asyncio.Task[None] | None = None
        self._clock: asyncio.TimerHandle | None = None
        self._timeouts = 0
        self._judging = False
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self.connected = asyncio.Event()
        self.on_connect: list[Callable[[], None]] = []

    @property
    def up(self) -> bool:
        """Whether calls are being sent; False means they fail at once."""
        return self._wire is not None

    async def start(self) -> None:
        """Dial once and wait for it; later losses heal in the background.

        Raises ``RedisAway`` when the first attempt fails; dialling goes on all the same.
        """
        try:
            await self._dial()
        except (OSError, RedisAway, TimeoutError) as exc:
            self._redial()
            raise RedisAway(f"{self.address}: {exc or type(exc).__name__}") from exc

    async def close(self) -> None:
        """End the connection and the dialling; later calls fail."""
        self._closed = True
        if self._dialling is not None:
            self._dialling.cancel()
        if self._clock is not None:
            self._clock.cancel()
        if self._wire is not None:
            self._wire.drop("link closed")

    def call(self, *args: Argument) -> asyncio.Future[Any]:
        """Send one command now; the future holds its reply.

        Raises (through the future) ``RedisAway``, ``NoScript`` or ``ScriptError``. Cancelling
        the future is safe at any time.
        """
        waiter: asyncio.Future[Any] = self._loop.create_future()
        wire = self._wire
        if wire is None:
            waiter.set_exception(NotSent(f"{self.address}: not connected"))
            return waiter
        wire.send(_pack(args), waiter, self._loop.time() + self._budget_s)
        if self._clock is None:
            self._clock = self._loop.call_later(self._budget_s, self._check)
        return waiter

    def _check(self) -> None:
        """Time out the calls at the head of the line; one timer serves them all."""
        self._clock = None
        wire, now = self._wire, self._loop.time()
        if wire is None or not wire.waiters:
            self._timeouts, self._judging = 0, False
            return
        if wire.waiters[0][1] <= now and not self._judging:
            # A loop that was held up finds timers due and answers unread: read first.
            self._judging = True
            self._clock = self._loop.call_later(0.001, self._check)
            return
        self._judging = False
        for waiter, deadline in wire.waiters:
            if deadline > now:
                break
            if not waiter.done():
                self._timeouts += 1
                waiter.set_exception(RedisAway(f"{self.address}: no answer in {self._budget_s} s"))
        if wire.waiters[0][1] > now:
            self._timeouts = 0
        elif self._timeouts >= _TIMEOUTS_TO_DROP:
            wire.drop("no answer to several calls")
            return
        rest = next((deadline for _, deadline in wire.waiters if deadline > now), now + 0.05)
        self._clock = self._loop.call_at(rest, self._check)

    async def _dial(self) -> None:
        async with asyncio.timeout(max(self._budget_s * 4, 1.0)):
            at = await self._resolver.resolve()
            if at.path:
                _, wire = await self._loop.create_unix_connection(self._new_wire, at.path)
            else:
                context = ssl.create_default_context() if at.tls else None
                _, wire = await self._loop.create_connection(
                    self._new_wire, at.host, at.port, ssl=context
                )
            try:
                await self._greet(wire, at)
            except BaseException:
                wire.drop("greeting failed")
                raise
        self._wire, self._timeouts = wire, 0
        self.connected.set()
        for hook in self.on_connect:
            hook()

    async def _greet(self, wire: _Wire, at: Address) -> None:
        """AUTH, SELECT, name the connection, and prove that this is a writable primary.

        PING and ROLE are fine on a primary that refuses scripts (CLUSTERDOWN, MISCONF): the link
        would be back and away again twenty times a second. So a write is tried as well.
        """
        commands: list[tuple[Argument, ...]] = []
        if at.password:
            user = (at.username,) if at.username else ()
            commands.append(("AUTH", *user, at.password))
        if at.db:
            commands.append(("SELECT", at.db))
        commands += [("CLIENT", "SETNAME", self._name), ("PING",), ("UNLINK", self._trial_key)]
        for command in commands:
            waiter: asyncio.Future[Any] = self._loop.create_future()
            wire.send(_pack(command), waiter, 0.0)
            try:
                await waiter
            except ScriptError as exc:
                if command[0] != "UNLINK":  # NOPERM: this user may run scripts only
                    raise RedisAway(f"{command[0]!s}: {exc}") from exc
        waiter = self._loop.create_future()
        wire.send(_pack(("ROLE",)), waiter, 0.0)
        if (await waiter)[0] != "master":
            raise RedisAway("not a primary")

    def _new_wire(self) -> _Wire:
        return _Wire(self._lost)

    def _lost(self, wire: _Wire, reason: str) -> None:
        if wire is not self._wire:
            return
        self._wire = None
        self.connected.clear()
        if not self._closed:
            log.warning("Redis %s is away: %s", self.address, reason)
            self._redial()

    def _redial(self) -> None:
        if not self._closed and (self._dialling is None or self._dialling.done()):
            self._dialling = self._loop.create_task(self._dial_until_up())

    async def _dial_until_up(self) -> None:
        pause = _BACKOFF_FIRST_S
        while True:
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            try:
                await self._dial()
            except (OSError, RedisAway, TimeoutError):
                pause = min(pause * 2, _BACKOFF_MAX_S)
            else:
                log.warning("Redis %s is back", self.address)
                return
