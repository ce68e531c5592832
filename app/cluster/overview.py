"""A pool at one glance, straight from Redis: what ``leaseway top`` shows.

Everything comes from records that are there anyway: percentiles, the curve and the share are those
of the TTFT windows, so answers that leave no sample (in one piece) do not show in them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from app.cluster import owners, picture
from app.cluster.owners import ReplicaRow  # noqa: TC001 - pydantic reads it at run time
from app.cluster.picture import NodeRow

if TYPE_CHECKING:
    from app.cluster.link import Link
    from app.keys import PoolKeys

_RECENT_MS = 10_000


class NodeView(NodeRow):
    """A node with the shape of its window."""

    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    ttft_recent_ms: list[float] = Field(description="the window, oldest sample first")
    share: float | None = Field(description="of the first tokens of the last 10 s, in [0, 1]")


class Overview(BaseModel):
    """One pool at one moment (of Redis' clock, ms)."""

    pool: str
    at_ms: int
    nodes: list[NodeView]
    replicas: list[ReplicaRow]


async def overview(link: Link, keys: PoolKeys, pool: str) -> Overview:
    """Read it. Raises ``RedisAway``."""
    rows, replicas, now = await asyncio.gather(
        picture.nodes(link, keys, pool), owners.replicas(link, keys, pool), owners.now_ms(link)
    )
    windows = await asyncio.gather(*(_window(link, keys.ttft(row.id)) for row in rows))
    rates = [_per_second(window, now) for window in windows]
    total = sum(rates)
    views = [
        NodeView(
            **row.model_dump(),
            ttft_p50_ms=_percentile(window, 0.50),
            ttft_p99_ms=_percentile(window, 0.99),
            ttft_recent_ms=[ttft_ms for ttft_ms, _ in window],
            share=rate / total if total else None,
        )
        for row, window, rate in zip(rows, windows, rates, strict=True)
    ]
    return Overview(pool=pool, at_ms=now, nodes=views, replicas=replicas)


async def _window(link: Link, key: str) -> list[tuple[float, int]]:
    """(TTFT in ms, taken at ms) of every sample, oldest first."""
    samples = [str(text).split(":") for text in await link.call("LRANGE", key, 0, -1)]
    return [(int(parts[0]) / 1000, int(parts[2])) for parts in reversed(samples)]


def _per_second(window: list[tuple[float, int]], now: int) -> float:
    """First tokens per second, of late. A busy node's window may hold less than that time."""
    recent = [at for _, at in window if at > now - _RECENT_MS]
    if not recent:
        return 0.0
    full = len(recent) == len(window) > 1
    return len(recent) * 1000 / (max(1, now - recent[0]) if full else _RECENT_MS)


def _percentile(window: list[tuple[float, int]], share: float) -> float | None:
    """Nearest rank."""
    ordered = sorted(ttft_ms for ttft_ms, _ in window)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
