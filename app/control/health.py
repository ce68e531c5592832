"""Liveness, readiness and metrics: answered from memory, never by asking a node or Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

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
        # `in_touch` is the last heartbeat's word: a script that ran, not a PING.
        ready = replica.in_touch and not replica.leaving
        status = "ok" if ready else "leaving" if replica.leaving else "redis_away"
        return JSONResponse(
            {"status": status, "replica": replica.id, "nodes": len(replica.nodes)},
            status_code=200 if ready else 503,
        )

    @routes.get("/metrics", summary="Prometheus text format")
    async def page() -> Response:
        metrics.leases_held.set(sum(pool.leases.held for pool in replica.pools.values()))
        metrics.reaped.set(replica.reaped)
        metrics.redis_up.set(1 if replica.link.up else 0)
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return routes
