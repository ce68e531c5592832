"""``/admin/nodes``: nodes come, change, drain and go while requests run.

The pick happens in Redis, so a change counts for every replica at once; their pictures (URLs,
models) follow within half a second.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import Response  # noqa: TC002 - FastAPI reads it at run time
from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.cluster import picture
from app.cluster.edits import fields_of
from app.cluster.operator import NodeExists, Operator
from app.cluster.picture import NodeRow  # noqa: TC001 - FastAPI reads it at run time
from app.cluster.registry import UnknownNode
from app.config import NodeChange, NodeSettings
from app.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastapi import APIRouter

    from app.cluster.replica import Pool, Replica

_OPEN_S = 60.0


class Draining(BaseModel):
    """How far a node is with its last requests."""

    id: str
    state: str
    leases: int = Field(description="requests that still run on it")
    done: bool = Field(description="no request comes any more, and none runs")


class Removed(BaseModel):
    """A node that was taken out."""

    id: str
    leases: int = Field(description="requests that still run on it; they end in peace")


class CircuitOrder(BaseModel):
    """Open a circuit for a time, after which one trial decides; or close it."""

    model_config = ConfigDict(extra="forbid")

    state: Literal["open", "closed"]
    seconds: Annotated[float, Field(gt=0, le=86_400)] | None = Field(
        default=None, description="until the trial; 60 when left out"
    )

    @model_validator(mode="after")
    def _only_open_for_a_time(self) -> CircuitOrder:
        if self.state == "closed" and self.seconds is not None:
            raise ValueError("seconds belong to state open; a closed circuit stays closed")
        return self


def mount(routes: APIRouter, replica: Replica) -> None:
    """Add the paths to ``routes``, whose prefix is ``/admin``."""

    @routes.get("/nodes", summary="All nodes with their live profile")
    async def nodes() -> list[NodeRow]:
        return [
            row
            for pool in replica.pools.values()
            for row in await picture.nodes(pool.link, pool.scripts.keys, pool.name)
        ]

    @routes.post("/nodes", summary="Add a node", status_code=201)
    async def add(node: NodeSettings, response: Response) -> NodeRow:
        pool = replica.pools.get(node.pool)
        if pool is None:
            raise _wrong("pool", f"no pool {node.pool!r}; a new one needs the settings file and "
                         f"a restart; there are {', '.join(replica.pools)}")  # fmt: skip
        _check_models(replica, pool, node.node().models)
        for other in replica.pools.values():
            if other is not pool and await _operator(other).knows(node.id):
                raise NodeExists(node.id)
        await _operator(pool).add(node.node())
        response.headers["location"] = f"/admin/nodes/{node.id}"
        return await _followed(pool, node.id)

    @routes.get("/nodes/{node_id}", summary="One node with its live profile")
    async def node(node_id: str) -> NodeRow:
        return await _row(await _home(replica, node_id), node_id)

    @routes.patch("/nodes/{node_id}", summary="Change what is set of a node")
    async def change(node_id: str, wanted: NodeChange) -> NodeRow:
        pool = await _home(replica, node_id)
        given: dict[str, Any] = wanted.model_dump(exclude_unset=True)
        if not given:
            return await _row(pool, node_id)
        node = NodeSettings(**{"id": node_id, "url": "http://as-it-was", **given}).node()
        _check_models(replica, pool, node.models)
        await _operator(pool).change(node_id, {name: fields_of(node)[name] for name in given})
        return await _followed(pool, node_id)

    @routes.delete("/nodes/{node_id}", summary="Take a node out; its requests end in peace")
    async def remove(node_id: str) -> Removed:
        pool = await _home(replica, node_id)
        running = await _operator(pool).remove(node_id)
        await pool.registry.follow()
        return Removed(id=node_id, leases=running)

    _mount_states(routes, replica)


def _mount_states(routes: APIRouter, replica: Replica) -> None:
    async def set_state(node_id: str, state: str) -> NodeRow:
        pool = await _home(replica, node_id)
        await _operator(pool).change(node_id, {"state": state})
        return await _followed(pool, node_id)

    @routes.post("/nodes/{node_id}/drain", summary="No new requests for a node, for now")
    async def drain(node_id: str) -> Draining:
        return _draining(await set_state(node_id, "draining"))

    @routes.get("/nodes/{node_id}/drain", summary="How far a node is with its last requests")
    async def drained(node_id: str) -> Draining:
        return _draining(await _row(await _home(replica, node_id), node_id))

    @routes.post("/nodes/{node_id}/disable", summary="No new requests for a node, for long")
    async def disable(node_id: str) -> NodeRow:
        return await set_state(node_id, "disabled")

    @routes.post("/nodes/{node_id}/enable", summary="Requests for a node again")
    async def enable(node_id: str) -> NodeRow:
        return await set_state(node_id, "active")

    @routes.post("/nodes/{node_id}/circuit", summary="Open a node's circuit, or close it")
    async def circuit(node_id: str, order: CircuitOrder) -> NodeRow:
        pool = await _home(replica, node_id)
        open_s = 0.0 if order.state == "closed" else order.seconds or _OPEN_S
        await _operator(pool).circuit(node_id, order.state, open_ms=math.ceil(open_s * 1000))
        return await _row(pool, node_id)


def _operator(pool: Pool) -> Operator:
    return Operator(pool.link, pool.scripts)


async def _home(replica: Replica, node_id: str) -> Pool:
    """The pool of a node. Raises ``UnknownNode``."""
    for pool in replica.pools.values():
        if await _operator(pool).knows(node_id):
            return pool
    raise UnknownNode(node_id)


async def _followed(pool: Pool, node_id: str) -> NodeRow:
    """The node after a change, which this replica knows before it says that it is made."""
    await pool.registry.follow()
    return await _row(pool, node_id)


async def _row(pool: Pool, node_id: str) -> NodeRow:
    row = await picture.node(pool.link, pool.scripts.keys, pool.name, node_id)
    if row is None:
        raise UnknownNode(node_id)
    return row


def _draining(row: NodeRow) -> Draining:
    idle = row.active == 0 and row.state != "active"
    return Draining(id=row.id, state=row.state, leases=row.active, done=idle)


def _check_models(replica: Replica, pool: Pool, models: Iterable[str]) -> None:
    for other in replica.pools.values():
        if other is not pool and (taken := other.registry.models.intersection(models)):
            raise _wrong("models", f"{min(taken)!r} is served in the pool {other.name!r}; "
                         "a model lives in one pool")  # fmt: skip


def _wrong(param: str, why: str) -> ApiError:
    return ApiError(
        422, f"{param}: {why}", kind="invalid_request_error", param=param, code="invalid_value"
    )
