"""``GET /v1/models``: the union over known nodes, from the registry's cache, no fan-out.

A model stays listed while any node is configured for it, even when all of them are down: what
exists and what is up are two questions (the second is ``/admin/nodes``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request

from app.errors import ApiError

if TYPE_CHECKING:
    from app.admission.keys import Keys
    from app.cluster.replica import Replica
    from app.config import KeySettings


def router(replica: Replica, keys: Keys, aliases: dict[str, str]) -> APIRouter:
    """The model list in the OpenAI shape; aliases are listed when their model is."""
    routes = APIRouter(tags=["models"])

    def visible(key: KeySettings | None) -> list[str]:
        served = set(replica.models)
        names = served | {public for public, model in aliases.items() if model in served}
        if key is not None and key.models is not None:
            names &= set(key.models)
        return sorted(names)

    @routes.get("/v1/models", summary="Models that the nodes serve")
    async def models(request: Request) -> dict[str, Any]:
        key = keys.identify(dict(request.headers.raw))
        return {"object": "list", "data": [_card(name) for name in visible(key)]}

    @routes.get("/v1/models/{name:path}", summary="One model")
    async def model(name: str, request: Request) -> dict[str, Any]:
        if name not in visible(keys.identify(dict(request.headers.raw))):
            raise ApiError(
                404,
                f"The model {name!r} does not exist.",
                kind="invalid_request_error",
                param="model",
                code="model_not_found",
            )
        return _card(name)

    return routes


def _card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "leaseway"}
