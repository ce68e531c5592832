"""``/metrics``: what this replica has counted itself, and the picture of the nodes in Redis.

Each replica is one process and shows its own counters; add them up over replicas. What is read
from Redis (``leaseway_node_…``, ``leaseway_replicas``, ``leaseway_redis_script…``) is the same
whichever replica is asked; it is left out while Redis is away, and a page waits half a second for
it at most: it is needed most when Redis is ill.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from app.cluster import picture
from app.errors import RedisAway, ScriptError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from app.cluster.link import Link
    from app.cluster.picture import NodeRow
    from app.cluster.replica import Pool, Replica
    from app.telemetry.metrics import Metrics

CIRCUITS = ("closed", "open", "half_open")
STATES = ("active", "draining", "disabled")
_PATIENCE_S = 0.5


class _Seen(NamedTuple):
    """One pool, as Redis tells of it. ``calls`` and ``took_s``: its server's scripts, all of them
    since it started."""

    pool: str
    rows: list[NodeRow]
    replicas: int
    calls: int
    took_s: float


class _Shared(Collector):
    def __init__(self, seen: list[_Seen]) -> None:
        self._seen = seen

    def collect(self) -> Iterator[Metric]:
        yield from _nodes(self._seen)
        yield from _pools(self._seen)


async def page(replica: Replica, metrics: Metrics) -> bytes:
    """The whole page, in Prometheus' text format."""
    seen = await asyncio.gather(*map(_look, replica.pools.values()))
    metrics.leases_held.set(sum(pool.leases.held for pool in replica.pools.values()))
    metrics.reaped.set(replica.reaped)
    metrics.redis_up.set(1 if replica.up else 0)
    shared = _Shared([one for one in seen if one is not None])
    # The library writes some hundred lines a millisecond: for that long requests must not wait.
    return await asyncio.to_thread(
        lambda: b"".join(map(generate_latest, (metrics.registry, shared)))
    )


async def _look(pool: Pool) -> _Seen | None:
    link, keys = pool.link, pool.scripts.keys
    try:
        async with asyncio.timeout(_PATIENCE_S):
            rows, replicas, stats = await asyncio.gather(
                picture.nodes(link, keys, pool.name),
                link.call("ZCARD", keys.replicas),
                _command_stats(link),
            )
    except (RedisAway, TimeoutError):
        return None
    return _Seen(pool.name, rows, replicas, *_scripts(stats))


async def _command_stats(link: Link) -> str:
    try:
        return str(await link.call("INFO", "commandstats"))
    except ScriptError:  # a user that may run scripts only is refused
        return ""


def _scripts(stats: str) -> tuple[int, float]:
    """Calls of scripts and seconds spent in them (https://redis.io/docs/latest/commands/info/)."""
    calls = took_us = 0
    for line in stats.splitlines():
        command, _, said = line.partition(":")
        if command in {"cmdstat_evalsha", "cmdstat_eval"}:
            numbers = dict(part.split("=", 1) for part in said.split(","))
            calls += int(numbers["calls"])
            took_us += int(numbers["usec"])
    return calls, took_us / 1e6


def _nodes(seen: list[_Seen]) -> Iterator[Metric]:
    by_node = ("pool", "node")
    in_flight = GaugeMetricFamily(
        "leaseway_node_in_flight", "Leases on a node, over all replicas.", labels=by_node
    )
    capacity = GaugeMetricFamily(
        "leaseway_node_capacity", "Most leases on a node, over all replicas.", labels=by_node
    )
    up = GaugeMetricFamily(
        "leaseway_node_up", "1 when the last verdict on a node's health is ok.", labels=by_node
    )
    ttft = GaugeMetricFamily(
        "leaseway_node_ttft_seconds", "Mean of a node's window of TTFT samples.", labels=by_node
    )
    state = GaugeMetricFamily(
        "leaseway_node_state",
        "1 for the admin state that a node is in.",
        labels=(*by_node, "state"),
    )
    circuit = GaugeMetricFamily(
        "leaseway_node_circuit", "1 for the state that a node's circuit is in.",
        labels=(*by_node, "state"),
    )  # fmt: skip
    score = GaugeMetricFamily(
        "leaseway_node_score", "Live score of a node for a model; 0: not eligible.",
        labels=(*by_node, "model"),
    )  # fmt: skip
    for row in (row for one in seen for row in one.rows):
        name = [row.pool, row.id]
        in_flight.add_metric(name, row.active)
        capacity.add_metric(name, row.capacity)
        up.add_metric(name, row.health == "ok")
        if row.ttft_ms is not None:
            ttft.add_metric(name, row.ttft_ms / 1000)
        for one in STATES:
            state.add_metric([*name, one], row.state == one)
        for one in CIRCUITS:
            circuit.add_metric([*name, one], row.circuit == one)
        for model, live in row.scores.items():
            score.add_metric([*name, model], live)
    yield from (in_flight, capacity, up, ttft, state, circuit, score)


def _pools(seen: list[_Seen]) -> Iterator[Metric]:
    replicas = GaugeMetricFamily(
        "leaseway_replicas", "Replicas that are members of a pool.", labels=("pool",)
    )
    calls = CounterMetricFamily(
        "leaseway_redis_scripts", "Scripts that the Redis of a pool has run, whoever asked.",
        labels=("pool",),
    )  # fmt: skip
    took_s = CounterMetricFamily(
        "leaseway_redis_script_seconds", "Time that it has spent in them.", labels=("pool",)
    )
    for one in seen:
        replicas.add_metric([one.pool], one.replicas)
        if one.calls:
            calls.add_metric([one.pool], one.calls)
            took_s.add_metric([one.pool], one.took_s)
    yield from (replicas, calls, took_s)
