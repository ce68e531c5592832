"""Liveness and readiness, answered from memory, never by asking a node or Redis; and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from app.control import scrape

if TYPE_CHECKING:
    from app.cluster.replica import Replica
    from app.telemetry.metrics import Metrics


def router(replica: Replica, metrics: Metrics) -> APIRouter:
    """``/healthz``, ``/readyz``, ``/metrics``."""
    routes = APIRouter(tags=["health"])

    @routes.get("/healthz", summary="Is the process alive?")
    async def healthz() -> dict[str, str]:
        return {"status": "ok", "replica": replica.id}

    @routes.get("/readyz", summary="Should traffic come here?")
    async def readyz() -> JSONResponse:
        # `up` is the last heartbeat's word: scripts that ran, not a PING. Without Redis the
        # replica serves on its own picture: degraded, but ready, or all would leave at once.
        status = "leaving" if replica.leaving else "ok" if replica.up else "degraded"
        ready = not replica.leaving and bool(replica.nodes)
        return JSONResponse(
            {"status": status, "replica": replica.id, "nodes": len(replica.nodes)},
            status_code=200 if ready else 503,
        )

    @routes.get("/metrics", summary="Prometheus text format", response_class=PlainTextResponse)
    async def page() -> Response:
        return Response(await scrape.page(replica, metrics), media_type=CONTENT_TYPE_LATEST)

    return routes
