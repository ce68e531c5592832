"""Requests and tokens per minute of each API key, counted over all replicas in Redis.

One script looks at both limits and counts a request only when both let it pass
(``lua/admit.lua``). Tokens are charged when a request comes, at what it is expected to use, and
put right when it ends. While Redis is away a replica counts alone, against its share of both.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

from app.cluster.link import NoScript
from app.errors import ApiError, RedisAway
from app.model import Quota

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from app.cluster.scripts import Scripts
    from app.config import KeySettings

log = logging.getLogger("leaseway.limits")
_UNIT = 60_000  # one unit of use, as in lua/_limit.lua: a level falls by the limit each ms


class Admission:
    """One request that was let in: ``with`` it, and what is not settled when it ends is given back.

    ``headers`` say how much of the limits is left; there are none for a key without limits.
    """

    __slots__ = ("_settle", "headers")

    def __init__(
        self,
        headers: list[tuple[bytes, bytes]],
        settle: Callable[[int], None] | None = None,
    ) -> None:
        self.headers = headers
        self._settle = settle

    def settle(self, tokens: int) -> None:
        """The request has used ``tokens``: the first call counts. Never waits."""
        settle, self._settle = self._settle, None
        if settle is not None:
            settle(tokens)

    def mark(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Put ours in the place of a node's: its limits are not the caller's."""
        if self.headers:
            headers[:] = [one for one in headers if not one[0].startswith(b"x-ratelimit-")]
            headers += self.headers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.settle(0)


_UNLIMITED = Admission([])


class Limits:
    """The limits of all keys. ``replicas`` tells how many share them while Redis is away."""

    def __init__(
        self,
        scripts: Scripts,
        replicas: Callable[[], int],
        now_ms: Callable[[], int] = lambda: int(monotonic() * 1000),
    ) -> None:
        self._scripts = scripts
        self._alone = Alone(replicas, now_ms)
        self._tasks: set[asyncio.Task[int]] = set()

    async def admit(self, key: KeySettings | None, tokens: int) -> Admission:
        """Count a request that is expected to use ``tokens`` against the limits of ``key``.

        Raises ``ApiError`` 429, and counts nothing, when one of them is reached.
        """
        if key is None or (key.rpm is None and key.tpm is None):
            return _UNLIMITED
        name, rpm, tpm = key.name, key.rpm or 0, key.tpm or 0
        settle, charged = self._settle, min(tokens, tpm)
        try:
            quota = await self._scripts.admit(name, rpm=rpm, tpm=tpm, cost=charged)
        except RedisAway:
            rpm, tpm = self._alone.share(rpm), self._alone.share(tpm)
            settle, charged = self._alone.settle, min(tokens, tpm)
            quota = self._alone.admit(name, rpm=rpm, tpm=tpm, cost=charged)
        headers = _headers(key, quota)
        if quota.reached:
            raise _over(key, quota, headers)
        if not tpm:
            return Admission(headers)

        def settled(used: int) -> None:
            settle(name, rpm=rpm, tpm=tpm, delta=used - charged)

        return Admission(headers, settled)

    def _settle(self, name: str, *, rpm: int, tpm: int, delta: int) -> None:
        if not delta:
            return

        def sent(answer: asyncio.Future[Any]) -> None:
            error = None if answer.cancelled() else answer.exception()
            if isinstance(error, NoScript):
                again = self._scripts.settle(name, rpm=rpm, tpm=tpm, delta=delta)
                task = asyncio.create_task(again)
                self._tasks.add(task)
                task.add_done_callback(self._settled)
            elif error is not None:
                _complain(error)

        answer = self._scripts.send_settle(name, rpm=rpm, tpm=tpm, delta=delta)
        answer.add_done_callback(sent)

    def _settled(self, task: asyncio.Task[int]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _complain(error)


def _complain(error: BaseException) -> None:
    # What is lost with Redis are the limits of one minute.
    level = logging.DEBUG if isinstance(error, RedisAway) else logging.ERROR
    log.log(level, "tokens were not settled: %s", error)


class Alone:
    """The scripts' buckets in this process, for the time without Redis."""

    def __init__(self, replicas: Callable[[], int], now_ms: Callable[[], int]) -> None:
        self._replicas = replicas
        self._now_ms = now_ms
        self._levels: dict[str, tuple[int, int, int]] = {}  # name → requests, tokens, at (ms)

    def share(self, limit: int) -> int:
        """This replica's part of a limit, so that together all stay near it; 0 is no limit."""
        return max(1, limit // max(1, self._replicas())) if limit else 0

    def admit(self, name: str, *, rpm: int, tpm: int, cost: int) -> Quota:
        """As ``lua/admit.lua``."""
        cost = min(cost, tpm)
        requests, tokens = self._now(name, rpm, tpm)
        request_ms = _falls(requests + _UNIT - rpm * _UNIT, rpm)
        token_ms = _falls(tokens + cost * _UNIT - tpm * _UNIT, tpm)
        reached = ""
        if request_ms or token_ms:
            reached = "requests" if request_ms > token_ms else "tokens"
        else:
            requests, tokens = requests + _UNIT, tokens + cost * _UNIT
            self._levels[name] = requests, tokens, self._now_ms()
        return Quota(
            reached,
            max(request_ms, token_ms),
            max(0, rpm - -(-requests // _UNIT)),
            _falls(requests, rpm),
            max(0, tpm - -(-tokens // _UNIT)),
            _falls(tokens, tpm),
        )

    def settle(self, name: str, *, rpm: int, tpm: int, delta: int) -> None:
        """As ``lua/settle.lua``."""
        requests, tokens = self._now(name, rpm, tpm)
        self._levels[name] = requests, max(0, tokens + delta * _UNIT), self._now_ms()

    def _now(self, name: str, rpm: int, tpm: int) -> tuple[int, int]:
        requests, tokens, at = self._levels.get(name, (0, 0, 0))
        past = self._now_ms() - at
        return (
            max(0, requests - past * rpm) if rpm else 0,
            max(0, tokens - past * tpm) if tpm else 0,
        )


def _falls(much: int, limit: int) -> int:
    """Ms until a level has fallen by ``much``; 0 without a limit."""
    return max(0, -(-much // limit)) if limit else 0


def _over(key: KeySettings, quota: Quota, headers: list[tuple[bytes, bytes]]) -> ApiError:
    limit = key.rpm if quota.reached == "requests" else key.tpm
    return ApiError(
        429,
        f"Rate limit of the key {key.name!r} reached: {limit} {quota.reached} per minute. "
        f"Try again in {_duration(quota.retry_ms)}.",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_s=quota.retry_ms / 1000,
        headers=headers,
    )


def _headers(key: KeySettings, quota: Quota) -> list[tuple[bytes, bytes]]:
    """https://platform.openai.com/docs/guides/rate-limits#rate-limits-in-headers"""
    found: list[tuple[bytes, bytes]] = []
    for what, limit, left, reset_ms in (
        (b"requests", key.rpm, quota.requests, quota.requests_ms),
        (b"tokens", key.tpm, quota.tokens, quota.tokens_ms),
    ):
        if limit is not None:
            found += [
                (b"x-ratelimit-limit-" + what, b"%d" % limit),
                (b"x-ratelimit-remaining-" + what, b"%d" % left),
                (b"x-ratelimit-reset-" + what, _duration(reset_ms).encode()),
            ]
    return found


def _duration(ms: int) -> str:
    """As OpenAI writes it: ``120ms``, ``1s``, ``8.64s``, ``6m0s``, ``1h0m0s``."""
    if ms < 1000:
        return f"{ms}ms" if ms else "0s"
    minutes, rest_ms = divmod(ms, 60_000)
    seconds = f"{rest_ms / 1000:g}s"
    if not minutes:
        return seconds
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{seconds}" if hours else f"{minutes}m{seconds}"
