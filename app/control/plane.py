"""The control plane: FastAPI for everything that is not forwarded, errors in the OpenAI shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from app.control import admin, health, models
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
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RedisAway, _redis_away)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    return app


def _shaped(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    return Response(error_body(error), error.status, media_type="application/json", headers=headers)


async def _api_error(_: Request, exc: Exception) -> Response:
    assert isinstance(exc, ApiError)  # noqa: S101 - registered for this type only
    return _shaped(exc, {name.decode(): value.decode() for name, value in exc.headers})


async def _redis_away(_: Request, exc: Exception) -> Response:
    return _shaped(
        ApiError(503, f"Redis is away: {exc}", kind="server_error", code="state_unavailable"),
        {"retry-after": "1"},
    )


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
    first = exc.errors()[0]
    field = ".".join(str(part) for part in first["loc"][1:]) or str(first["loc"][0])
    return _shaped(
        ApiError(
            422,
            f"{field}: {first['msg']}",
            kind="invalid_request_error",
            param=field,
            code="invalid_value",
        )
    )
