"""The control plane: FastAPI for everything that is not forwarded, errors in the OpenAI shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from app.cluster.link import NotSent
from app.cluster.operator import Contended, NodeExists
from app.cluster.registry import UnknownNode
from app.control import admin, dashboard, health, models
from app.errors import ApiError, RedisAway
from app.gateway.shape import error_body

if TYPE_CHECKING:
    from app.admission.keys import Keys
    from app.cluster.replica import Replica
    from app.config import Settings
    from app.telemetry.metrics import Metrics


def control_plane(
    settings: Settings, replica: Replica, keys: Keys, metrics: Metrics, *, lifespan: Any
) -> FastAPI:
    """Wire the routers."""
    app = FastAPI(
        title="Leaseway",
        summary="Control plane of a cluster of LLM inference gateways.",
        version="0.1.0",
        lifespan=lifespan,
    )
    app.include_router(health.router(replica, metrics))
    app.include_router(models.router(replica, keys, settings.aliases))
    app.include_router(admin.router(replica, keys))
    app.include_router(dashboard.router(replica, keys))
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RedisAway, _redis_away)
    for known in (UnknownNode, NodeExists, Contended):
        app.add_exception_handler(known, _not_so)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    return app


def _shaped(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    return Response(error_body(error), error.status, media_type="application/json", headers=headers)


async def _api_error(_: Request, exc: Exception) -> Response:
    assert isinstance(exc, ApiError)  # noqa: S101 - registered for this type only
    return _shaped(exc, {name.decode(): value.decode() for name, value in exc.headers})


async def _redis_away(request: Request, exc: Exception) -> Response:
    message = f"Redis is away: {exc}"
    if request.method != "GET" and not isinstance(exc, NotSent):
        message += "; the change may have been made: look before you repeat it"
    error = ApiError(503, message, kind="server_error", code="state_unavailable")
    return _shaped(error, {"retry-after": "1"})


async def _not_so(_: Request, exc: Exception) -> Response:
    """What was asked does not fit what there is."""
    node_id = str(exc)
    if isinstance(exc, UnknownNode):
        status, message, code = 404, f"There is no node {node_id!r}.", "node_not_found"
    elif isinstance(exc, NodeExists):
        status, code = 409, "node_exists"
        message = f"There is a node {node_id!r} already; PATCH changes it."
    else:
        status, code = 409, "contended"
        message = f"Others change the node {node_id!r} just now; repeat."
    error = ApiError(status, message, kind="invalid_request_error", param="id", code=code)
    return _shaped(error)


async def _http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)  # noqa: S101 - registered for this type only
    message = {
        404: f"Unknown path {request.url.path}.",
        405: f"{request.method} is not allowed on {request.url.path}.",
    }.get(exc.status_code, str(exc.detail))
    code = {404: "not_found", 405: "method_not_allowed"}.get(exc.status_code)
    return _shaped(
        ApiError(exc.status_code, message, kind="invalid_request_error", code=code),
        dict(exc.headers or {}),
    )


async def _invalid(_: Request, exc: Exception) -> Response:
    assert isinstance(exc, RequestValidationError)  # noqa: S101 - registered for this type only
    # An error of a list that could also be 'discovered' comes with one that says so.
    errors = [e for e in exc.errors() if "literal['discovered']" not in e["loc"]] or exc.errors()
    first = errors[0]
    found = [str(part) for part in first["loc"][1:] if "[" not in str(part)]  # "list[…]": no field
    what = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        found, what = [], f"not valid JSON: {first['ctx']['error']}"
    field = ".".join(found) or None
    return _shaped(
        ApiError(
            422,
            f"{field or first['loc'][0]}: {what}",
            kind="invalid_request_error",
            param=field,
            code="invalid_value",
        )
    )
