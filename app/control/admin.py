"""``/admin``: the live state of the cluster for operators, straight from Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Query
from fastapi.routing import APIRoute
from pydantic import BaseModel

from app.cluster import owners, picture
from app.cluster.owners import (  # noqa: TC001 - FastAPI reads them at run time
    LeasePage,
    ReplicaRow,
)
from app.cluster.picture import ScoreRow  # noqa: TC001
from app.config import Name, masked
from app.control import nodes
from app.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from fastapi import Request, Response

    from app.admission.keys import Keys
    from app.cluster.replica import Replica

Limit = Annotated[int, Query(ge=1, le=1000, description="The oldest so many.")]
OfNode = Annotated[Name | None, Query(description="Only leases on this node.")]


class Fault(BaseModel):
    """What went wrong, in the words of the OpenAI API."""

    message: str
    type: str
    param: str | None
    code: str | None


class FaultBody(BaseModel):
    """Every answer that is an error."""

    error: Fault


_FAULTS: dict[int | str, dict[str, Any]] = {
    401: {"description": "No key, or a wrong one"},
    403: {"description": "Not an admin's key, or a page of another site"},
    404: {"description": "No such node"},
    409: {"description": "The node is there already, or is being changed by others"},
    422: {"description": "A value that cannot be; `param` names it"},
    503: {"description": "Redis is away; whether a change was made is not known"},
}


_CROSS_SITE = ApiError(
    403,
    "Pages of other sites may not use the admin API.",
    kind="invalid_request_error",
    code="cross_site",
)


def router(replica: Replica, keys: Keys) -> APIRouter:
    """Everything under ``/admin``; behind an admin key when keys are configured."""

    class Guarded(APIRoute):
        """Asks for the key before anything else is looked at."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            answer = super().get_route_handler()

            async def let_in(request: Request) -> Response:
                keys.require_admin(dict(request.headers.raw))
                # Without keys the browser of whoever can reach this port would do for any page.
                if request.headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}:
                    raise _CROSS_SITE
                return await answer(request)

            return let_in

    routes = APIRouter(
        prefix="/admin",
        tags=["admin"],
        route_class=Guarded,
        responses={status: {**fault, "model": FaultBody} for status, fault in _FAULTS.items()},
    )
    nodes.mount(routes, replica)

    @routes.get("/scores", summary="The ranking of every model, best first")
    async def scores() -> list[ScoreRow]:
        return [
            row
            for pool in replica.pools.values()
            for row in await picture.scores(pool.link, pool.scripts.keys, pool.name)
        ]

    @routes.get("/replicas", summary="The replicas that have a heartbeat, and what they carry")
    async def replicas() -> list[ReplicaRow]:
        return [
            row
            for pool in replica.pools.values()
            for row in await owners.replicas(pool.link, pool.scripts.keys, pool.name)
        ]

    @routes.get("/leases", summary="Requests in flight over all replicas, oldest first")
    async def leases(limit: Limit = 100, node: OfNode = None) -> LeasePage:
        pages = [
            await owners.leases(pool.link, pool.scripts.keys, pool.name, limit=limit, node=node)
            for pool in replica.pools.values()
        ]
        return owners.oldest(pages, limit)

    @routes.get("/config", summary="The settings in force on this replica, secrets hidden")
    async def config() -> dict[str, Any]:
        return masked(replica.settings)

    return routes
