"""Shared state as anybody can read it: the documented Redis keys (DESIGN, section 3)."""

from __future__ import annotations

import contextlib
import json
import math
import re
import secrets
import socket
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.keys import pool_keys
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import redis

KEYS = pool_keys("lw", "default")

# One step, so that counters and leases are of the same instant.
_SNAPSHOT = """
local prefix, counters, leases, owners = ARGV[1], {}, {}, {}
for _, key in ipairs(redis.call('KEYS', prefix .. 'active:*')) do
  counters[string.sub(key, #prefix + 8)] = redis.call('GET', key)
end
for _, key in ipairs(redis.call('KEYS', prefix .. 'leases:*')) do
  leases[string.sub(key, #prefix + 8)] = redis.call('HGETALL', key)
end
local listed = redis.call('ZRANGE', prefix .. 'replicas', 0, -1)
return cjson.encode({counters, leases, listed})
"""


@dataclass(frozen=True, slots=True)
class Lease:
    """One lease record."""

    id: str
    replica: str
    node: str
    epoch: int
    start_ms: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counters (node → in flight), leases and listed replicas at one instant."""

    counters: dict[str, int]
    leases: list[Lease]
    replicas: set[str]

    @property
    def by_leases(self) -> dict[str, int]:
        """Node → number of leases that name it."""
        return dict(Counter(lease.node for lease in self.leases))


def snapshot(valkey: redis.Redis) -> Snapshot:
    """Counters and leases in one atomic read."""
    counters, leases, listed = json.loads(str(valkey.eval(_SNAPSHOT, 0, KEYS.prefix)))
    found = []
    for replica, flat in _pairs(leases):
        for lease_id, record in zip(flat[::2], flat[1::2], strict=True):
            node, epoch, start_ms, size, *_ = record.rstrip("+").split(" ")  # "+": has its sample
            found.append(Lease(lease_id, replica, node, int(epoch), int(start_ms), int(size)))
    return Snapshot({n: int(v) for n, v in _pairs(counters)}, found, set(listed))


def _pairs(table: Any) -> list[tuple[str, Any]]:
    return list(table.items()) if table else []  # cjson writes an empty table as {}


def load(valkey: redis.Redis, node: str) -> int:
    """Active requests of ``node`` as the gateways see them."""
    return int(valkey.get(KEYS.active(node)) or 0)


def leases(valkey: redis.Redis) -> list[Lease]:
    """All lease records of all replicas."""
    return snapshot(valkey).leases


def scores(valkey: redis.Redis, model: str = "m") -> dict[str, float]:
    """Node → live score."""
    return dict(valkey.zrange(KEYS.score(model), 0, -1, withscores=True))  # type: ignore[arg-type]


def record(valkey: redis.Redis, node: str) -> dict[str, str]:
    """The record of a node."""
    return dict(valkey.hgetall(KEYS.node(node)))  # type: ignore[arg-type]


def unloaded(valkey: redis.Redis) -> bool:
    """load = 0 for every node, and no lease left behind."""
    now = snapshot(valkey)
    return not now.leases and not any(now.counters.values())


def counters_equal_leases(valkey: redis.Redis) -> bool:
    """Whether each counter equals the leases that name its node."""
    now = snapshot(valkey)
    return {n: c for n, c in now.counters.items() if c} == now.by_leases


def assert_counters_equal_leases(valkey: redis.Redis) -> None:
    """Each counter equals the leases that name its node; every lease has a listed owner."""
    now = snapshot(valkey)
    assert {n: c for n, c in now.counters.items() if c} == now.by_leases
    assert {lease.replica for lease in now.leases} <= now.replicas


# Terms and load of a node under policy work; nothing under another.
_ROW = """#!lua
local text = redis.call('HGET', KEYS[1], ARGV[1])
if not text then return {} end
local row = {struct.unpack('<dddd', text)}
for i = 1, 4 do row[i] = string.format('%.17g', row[i]) end
return {row[1], row[2], row[3], row[4]}
"""


def assert_scores_equal_records(valkey: redis.Redis, model: str = "m") -> None:
    """Each live score is the one that the node's own record, row and counter give (policies work
    and ttft, with their defaults)."""
    for node, score in scores(valkey, model).items():
        fields, n = record(valkey, node), load(valkey, node)
        usable = n < int(fields["capacity"]) and float(fields["base"])
        row = [float(value) for value in valkey.eval(_ROW, 1, KEYS.work, node)]
        if row:
            cost, per_prompt, per_output, inflight = row
            assert inflight == n, (node, row, n)
            right = 1000 / (cost + 512 * per_prompt + 100 * per_output) if usable else 0.0
        else:
            right = usable / (n + 1)
        assert math.isclose(score, right, rel_tol=1e-9), (node, score, n, fields, row)


class Sampler:
    """What was seen of the counters while it ran: ``lowest`` and ``highest`` of each node."""

    def __init__(self) -> None:
        self.lowest: dict[str, int] = {}
        self.highest: dict[str, int] = {}
        self.samples = 0

    def _take(self, counters: dict[str, int]) -> None:
        self.samples += 1
        for node, count in counters.items():
            self.lowest[node] = min(count, self.lowest.get(node, count))
            self.highest[node] = max(count, self.highest.get(node, count))


@contextlib.contextmanager
def sampling(valkey: redis.Redis, every_s: float = 0.01) -> Iterator[Sampler]:
    """Sample all counters in the background; a count below zero fails the test at the end."""
    seen, stop = Sampler(), threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while not stop.wait(every_s):
                seen._take(snapshot(valkey).counters)
        except Exception as exc:
            errors.append(exc)

    thread = threading.Thread(target=run, name="sampler", daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join(5)
    if errors:
        raise errors[0]
    seen._take(snapshot(valkey).counters)
    assert all(count >= 0 for count in seen.lowest.values()), seen.lowest


@dataclass(frozen=True, slots=True)
class Seen:
    """One command as MONITOR shows it: ``source`` is the client's address, or ``lua``."""

    source: str
    words: tuple[str, ...]

    @property
    def verb(self) -> str:
        """The command's name in capitals."""
        return self.words[0].upper()


_LINE = re.compile(r"\+\d+\.\d+ \[\d+ (\S+)\] (.*)")
_WORD = re.compile(r'"((?:[^"\\]|\\.)*)"')


@contextlib.contextmanager
def monitoring(valkey: redis.Redis, port: int) -> Iterator[list[Seen]]:
    """MONITOR: every command that the server at ``port`` runs; complete when the block is left."""
    seen: list[Seen] = []
    end = secrets.token_hex(8)
    lines: list[str] = []
    sock = socket.create_connection(("127.0.0.1", port))

    def run() -> None:
        with sock, sock.makefile("r", encoding="utf-8", newline="\r\n") as file:
            for line in file:
                lines.append(line)
                if end in line:
                    return

    thread = threading.Thread(target=run, name="monitor", daemon=True)
    thread.start()
    sock.sendall(b"MONITOR\r\n")
    wait_until(lambda: lines, what="MONITOR answers")
    try:
        yield seen
    finally:
        valkey.echo(end)
        thread.join(10)
    assert not thread.is_alive()
    matches = (_LINE.match(line) for line in lines)
    seen += [Seen(found[1], tuple(_WORD.findall(found[2]))) for found in matches if found]
