"""Who holds what: the replicas of a pool and their leases, straight from Redis.

Read-only and bounded: a replica may hold ten thousand leases, and Redis serves requests meanwhile.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

if TYPE_CHECKING:
    from app.cluster.link import Link
    from app.keys import PoolKeys

_BATCH = 500
_MOST = 20_000  # leases that are looked at for one page


class ReplicaRow(BaseModel):
    """One gateway process that has a heartbeat in the pool."""

    pool: str
    replica: str
    leases: int = Field(description="in-flight requests that it carries")
    expires_in_s: float = Field(description="until it counts as dead; below 0: it does already")


class LeaseRow(BaseModel):
    """One request in flight; nothing of its content."""

    pool: str
    lease: str
    replica: str
    node: str
    age_s: float | None = Field(description="null: granted while Redis had never been there")
    prompt_tokens: int
    answering: bool = Field(description="its first token has come")


class LeasePage(BaseModel):
    """The oldest leases first."""

    total: int = Field(description="all leases there are")
    leases: list[LeaseRow]


async def now_ms(link: Link) -> int:
    """What Redis' clock says. Raises ``RedisAway``."""
    seconds, micros = await link.call("TIME")
    return int(seconds) * 1000 + int(micros) // 1000


async def replicas(link: Link, keys: PoolKeys, pool: str) -> list[ReplicaRow]:
    """All replicas of the pool by name. Raises ``RedisAway``."""
    flat, now = await asyncio.gather(
        link.call("ZRANGE", keys.replicas, 0, -1, "WITHSCORES"), now_ms(link)
    )
    names = flat[::2]
    held = await asyncio.gather(*(link.call("HLEN", keys.leases(name)) for name in names))
    rows = [
        ReplicaRow(
            pool=pool,
            replica=name,
            leases=count,
            expires_in_s=round((float(expiry) - now) / 1000, 3),
        )
        for name, expiry, count in zip(names, flat[1::2], held, strict=True)
    ]
    return sorted(rows, key=lambda row: row.replica)


async def leases(
    link: Link, keys: PoolKeys, pool: str, *, limit: int, node: str | None = None
) -> LeasePage:
    """The ``limit`` oldest leases of the pool, or of one node. Raises ``RedisAway``.

    ``total`` counts all of them, or those of the node among the first twenty thousand.
    """
    owners = await replicas(link, keys, pool)
    now = await now_ms(link)
    rows: dict[str, LeaseRow] = {}
    for owner in owners:
        cursor = None
        while cursor != "0" and len(rows) < _MOST:
            cursor, flat = await link.call(
                "HSCAN", keys.leases(owner.replica), cursor or "0", "COUNT", _BATCH
            )
            for lease_id, record in zip(flat[::2], flat[1::2], strict=True):
                rows[lease_id] = _row(pool, owner.replica, lease_id, record, now)
    found = [row for row in rows.values() if node in {None, row.node}]
    found.sort(key=_age, reverse=True)
    total = sum(owner.leases for owner in owners) if node is None else len(found)
    return LeasePage(total=max(total, len(found)), leases=found[:limit])


def oldest(pages: list[LeasePage], limit: int) -> LeasePage:
    """The pages of several pools as one."""
    rows = [row for page in pages for row in page.leases]
    rows.sort(key=_age, reverse=True)
    return LeasePage(total=sum(page.total for page in pages), leases=rows[:limit])


def _age(row: LeaseRow) -> float:
    return -1 if row.age_s is None else row.age_s


def _row(pool: str, replica: str, lease_id: str, record: str, now: int) -> LeaseRow:
    node, _, start, size, *_ = record.rstrip("+").split(" ")
    return LeaseRow(
        pool=pool,
        lease=lease_id,
        replica=replica,
        node=node,
        age_s=round(max(0, now - int(start)) / 1000, 3) if int(start) else None,
        prompt_tokens=int(size),
        answering=record.endswith("+"),
    )
