"""``/admin``: the live state of the cluster, for operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Depends, Request

from app.cluster import picture
from app.cluster.picture import NodeRow, ScoreRow  # noqa: TC001 - FastAPI reads them at run time

if TYPE_CHECKING:
    from app.admission.keys import Keys
    from app.cluster.replica import Replica


def router(replica: Replica, keys: Keys) -> APIRouter:
    """Read-only views, straight from Redis; behind an admin key when keys are configured."""

    async def admin_only(request: Request) -> None:
        keys.require_admin(dict(request.headers.raw))

    routes = APIRouter(prefix="/admin", tags=["admin"], dependencies=[Depends(admin_only)])

    @routes.get("/nodes", summary="All nodes with their live profile")
    async def nodes() -> list[NodeRow]:
        return [
            row
            for pool in replica.pools.values()
            for row in await picture.nodes(pool.link, pool.scripts.keys, pool.name)
        ]

    @routes.get("/scores", summary="The ranking of every model, best first")
    async def scores() -> list[ScoreRow]:
        return [
            row
            for pool in replica.pools.values()
            for row in await picture.scores(pool.link, pool.scripts.keys, pool.name)
        ]

    return routes
