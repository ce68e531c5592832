"""The live picture of a pool, straight from Redis: what ``/admin`` and the CLI show.

Read-only and not atomic over nodes; every row is one node's record as it stood.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from app.cluster.edits import Edit

if TYPE_CHECKING:
    from app.cluster.link import Link
    from app.keys import PoolKeys


class NodeRow(BaseModel):
    """One node, live."""

    id: str
    pool: str
    url: str
    models: list[str]
    engine: str
    state: str = Field(description="admin state: active, draining, disabled")
    health: str
    circuit: str = Field(description="closed, open or half_open")
    weight: float = Field(description="K of the score")
    capacity: int = Field(description="cluster-wide cap on in-flight leases")
    active: int = Field(description="in-flight leases over all replicas")
    ttft_ms: float | None = Field(description="mean of the TTFT window; null when it is empty")
    samples: int = Field(description="TTFT samples in the window")
    tokens_per_s: float | None = Field(description="decode rate of one stream, recent mean")
    streak: int = Field(description="failures since the last good answer")
    epoch: int
    source: str = Field(description="config: in a settings file; admin: added by hand")
    edited: list[str] = Field(description="what is set by hand, over the settings file")
    scores: dict[str, float] = Field(description="model → live score; 0 = not eligible")


class ScoreRow(BaseModel):
    """One line of a model's ranking."""

    pool: str
    model: str
    node: str
    score: float


async def nodes(link: Link, keys: PoolKeys, pool: str) -> list[NodeRow]:
    """All nodes of the pool by id. Raises ``RedisAway``."""
    ids = sorted(await link.call("SMEMBERS", keys.nodes))
    rows = await asyncio.gather(*(node(link, keys, pool, node_id) for node_id in ids))
    return [row for row in rows if row is not None]


async def node(link: Link, keys: PoolKeys, pool: str, node_id: str) -> NodeRow | None:
    """One node; None when it is not there, or taken out. Raises ``RedisAway``."""
    flat, active, edit = await asyncio.gather(
        link.call("HGETALL", keys.node(node_id)),
        link.call("GET", keys.active(node_id)),
        link.call("HGET", keys.edits, node_id),
    )
    record = dict(zip(flat[::2], flat[1::2], strict=True))
    if "url" not in record or record.get("state") == "removed":
        return None
    models = [m for m in record["models"].split("\n") if m]
    scores = await asyncio.gather(
        *(link.call("ZSCORE", keys.score(model), node_id) for model in models)
    )
    samples = int(record.get("samples", 0))
    tpot_us = float(record.get("tpot_us") or 0)
    return NodeRow(
        id=node_id,
        pool=pool,
        url=record["url"],
        models=models,
        engine=record.get("engine", "auto"),
        state=record.get("state", "active"),
        health=record.get("health", "ok"),
        circuit=record.get("circuit", "closed"),
        weight=float(record["weight"]),
        capacity=int(record["capacity"]),
        active=int(active or 0),
        ttft_ms=round(int(record["sum_us"]) / samples / 1000, 3) if samples else None,
        samples=samples,
        tokens_per_s=round(1e6 / tpot_us, 2) if tpot_us else None,
        streak=int(record.get("streak", 0)),
        epoch=int(record.get("epoch", 0)),
        source=record.get("source", "admin"),
        edited=sorted(Edit.parse(edit).fields),
        scores={m: float(s) for m, s in zip(models, scores, strict=True) if s is not None},
    )


async def scores(link: Link, keys: PoolKeys, pool: str) -> list[ScoreRow]:
    """The ranking of every model of the pool, best first. Raises ``RedisAway``."""
    models = sorted({model for row in await nodes(link, keys, pool) for model in row.models})
    ranked: list[ScoreRow] = []
    for model in models:
        flat = await link.call("ZREVRANGE", keys.score(model), 0, -1, "WITHSCORES")
        ranked += [
            ScoreRow(pool=pool, model=model, node=node, score=float(score))
            for node, score in zip(flat[::2], flat[1::2], strict=True)
        ]
    return ranked
