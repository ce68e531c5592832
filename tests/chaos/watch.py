"""Looks at shared state and at ``/healthz`` all the time, from outside."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from app.keys import pool_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.chaos.truth import Truth

_EVERY_S = 0.02
_LIVENESS_EVERY_S = 0.25
_PATIENCE_S = 5.0
SLOW_S = 1.0

# Counters, leases, owners and verdicts of one instant.
_LOOK = """
local prefix, active, leases, owners, nodes = ARGV[1], {}, {}, {}, {}
local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000
for _, key in ipairs(redis.call('KEYS', prefix .. 'active:*')) do
  active[string.sub(key, #prefix + 8)] = tonumber(redis.call('GET', key))
end
for _, key in ipairs(redis.call('KEYS', prefix .. 'leases:*')) do
  local records = redis.call('HVALS', key)
  owners[string.sub(key, #prefix + 8)] = #records
  for _, record in ipairs(records) do
    local node = string.match(record, '^%S+')
    leases[node] = (leases[node] or 0) + 1
  end
end
for _, key in ipairs(redis.call('KEYS', prefix .. 'node:*')) do
  local health, circuit, cooling = unpack(redis.call('HMGET', key, 'health', 'circuit',
    'cooling_until_ms'))
  nodes[string.sub(key, #prefix + 6)] = (health or 'none') .. ' ' .. (circuit or 'none')
    .. ((tonumber(cooling or '') or 0) > now and ' cooling' or '')
end
local replicas = redis.call('ZRANGE', prefix .. 'replicas', 0, -1)
return cjson.encode({active, leases, owners, nodes, replicas})
"""
WELL = "ok closed"


@dataclass(frozen=True, slots=True)
class Sample:
    """Shared state at one instant. ``nodes``: health, circuit, cooling by node."""

    at: float
    active: dict[str, int]
    leases: dict[str, int]
    owners: dict[str, int]
    nodes: dict[str, str]
    replicas: list[str]

    @property
    def drifted(self) -> bool:
        """Whether a counter differs from the number of leases that name its node."""
        return {n: c for n, c in self.active.items() if c} != self.leases

    @property
    def negative(self) -> bool:
        """Whether a counter is below zero."""
        return min(self.active.values(), default=0) < 0

    @property
    def ownerless(self) -> bool:
        """Whether a lease belongs to a replica that nobody could find dead."""
        return bool(set(self.owners) - set(self.replicas))

    @property
    def settled(self) -> bool:
        """Whether nothing is leased and every counter is 0."""
        return not self.owners and not any(self.active.values())


class CounterWatch:
    """A thread that samples shared state; ``samples`` are in order of time."""

    def __init__(self, port: int) -> None:
        self._client = redis.Redis(
            port=port, decode_responses=True, socket_timeout=1, retry=Retry(NoBackoff(), 0)
        )
        self._prefix = pool_keys("lw", "default").prefix
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.samples: list[Sample] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(5)
        self._client.close()

    def look(self) -> Sample:
        """Shared state now. Raises ``redis.RedisError`` while it is away."""
        parts = json.loads(str(self._client.eval(_LOOK, 0, self._prefix)))
        # cjson writes an empty table as {}.
        active, leases, owners, nodes, replicas = parts
        return Sample(monotonic(), active, leases, owners, nodes, list(replicas))

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_S):
            with contextlib.suppress(redis.RedisError):
                self.samples.append(self.look())

    def between(self, start: float, end: float) -> list[Sample]:
        """The samples of a time."""
        samples = self.samples
        return samples[
            bisect_left(samples, start, key=lambda s: s.at) :
            bisect_right(samples, end, key=lambda s: s.at)
        ]  # fmt: skip


class LivenessWatch:
    """Asks every replica's ``/healthz``; answers count while the replica had no fault.

    From threads of its own: the loop of the clients, which also starts processes, has pauses that
    are no replica's.
    """

    def __init__(
        self, ports: Mapping[str, int], truth: Truth, report: Callable[[str, str], None]
    ) -> None:
        self._ports = ports
        self._truth = truth
        self._report = report
        self.took_s: list[float] = []
        self.by_status: Counter[int] = Counter()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=one, name=f"liveness {one[0]}", daemon=True)
            for one in ports.items()
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * _PATIENCE_S)

    def _ask(self, name: str, port: int) -> None:
        while not self._stop.wait(_LIVENESS_EVERY_S):
            start = monotonic()
            status = _status(port)
            took = monotonic() - start
            if not self._truth.during("replica", start, monotonic(), name):
                self.took_s.append(took)
                self.by_status[status] += 1
                if status != 200 or took > SLOW_S:
                    self._report("liveness", f"/healthz of {name}: {status} after {took:.2f} s")

    def quantile_s(self, share: float) -> float:
        """The time that this share of the answers took at most."""
        times = sorted(self.took_s)
        return times[min(len(times) - 1, int(share * len(times)))] if times else 0.0


def _status(port: int) -> int:
    """Of ``/healthz``; 0 without an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE_S)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()
