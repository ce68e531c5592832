"""The pages of a fake node: health, models, metrics, and the control plane."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import orjson

from app.lab.answers import unix_now
from app.lab.faults import Fault, parse_fault
from app.lab.http1 import error_body

if TYPE_CHECKING:
    from app.lab.http1 import Connection, Request
    from app.lab.node import FakeNode

HEALTHY: Final[dict[str, Any]] = {"status": "ok"}
LOADING: Final[dict[str, Any]] = {
    "error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}
}
_CREATED: Final = unix_now()


class SlowPage:
    """A page that may answer late and is not a model request, so no ledger counts it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._timer: asyncio.TimerHandle | None = None
        connection.exchange = self

    def answer_later(self, status: int, payload: object, delay_ms: float) -> None:
        """Answer `delay_ms` from now."""
        self._timer = asyncio.get_running_loop().call_later(
            delay_ms / 1000, self._connection.respond, status, payload
        )

    def abandoned(self) -> None:
        """The client has left."""
        if self._timer is not None:
            self._timer.cancel()

    def writable(self) -> None:
        """Nothing was held back."""


def sick_health(fault: Fault, connection: Connection) -> bool:
    """Answer GET /health as the fault wants it; False if health is not touched."""
    status, payload = 200, HEALTHY
    if fault.health_fails:
        status, payload = 503, error_body(503, "unhealthy")
    elif fault.mode == "loading":
        status, payload = 503, LOADING
    elif not fault.health_delay_ms:
        return False
    SlowPage(connection).answer_later(status, payload, fault.health_delay_ms)
    return True


def serve_page(node: FakeNode, path: str, connection: Connection) -> None:
    """Answer a GET outside the control plane."""
    models = node.config.models
    context = node.config.profile.kv_tokens
    if path == "/health":
        connection.respond(200, HEALTHY)
    elif path == "/metrics":
        connection.respond(200, metrics(node))
    elif path == "/v1/models":
        page = {"object": "list", "data": [model_card(model, context) for model in models]}
        connection.respond(200, page)
    elif (model := path.removeprefix("/v1/models/")) in models:
        connection.respond(200, model_card(model, context))
    else:
        connection.respond(404, error_body(404, f"no such path: {path}"))


def serve_control(node: FakeNode, request: Request, connection: Connection) -> None:
    """Answer a request to the control plane."""
    match request.method, request.path:
        case "GET", "/_fake/stats":
            connection.respond(200, stats(node))
        case "GET", "/_fake/faults":
            connection.respond(200, node.fault.to_json())
        case "POST", "/_fake/faults":
            try:
                node.fault = parse_fault(orjson.loads(request.body))
            except ValueError as error:
                connection.respond(400, error_body(400, str(error)))
            else:
                connection.respond(200, node.fault.to_json())
        case "POST", "/_fake/reset":
            node.stats.reset()
            connection.respond(200, stats(node))
        case _:
            connection.respond(404, error_body(404, f"no such path: {request.path}"))


def stats(node: FakeNode) -> dict[str, Any]:
    """Build the body of GET /_fake/stats. `kv_used` is tokens, `uptime_s` seconds."""
    return {
        "id": node.config.name,
        **node.stats.to_json(),
        "running": node.engine.running,
        "queue": node.engine.waiting,
        "kv_used": node.engine.kv_used,
        "connections": len(node.connections),
        "uptime_s": round(node.uptime_s, 3),
    }


def metrics(node: FakeNode) -> bytes:
    """Build the Prometheus page, under vLLM's names. All models share the one engine."""
    engine = node.engine
    rows = (
        ("num_requests_running", "gauge", engine.running),
        ("num_requests_waiting", "gauge", engine.waiting),
        ("kv_cache_usage_perc", "gauge", engine.kv_used / engine.profile.kv_tokens),
        ("prompt_tokens_total", "counter", node.stats.prompt_tokens),
        ("generation_tokens_total", "counter", node.stats.completion_tokens),
    )
    labels = f'{{engine="0",model_name="{node.config.models[0]}"}}'
    return "".join(
        f"# TYPE vllm:{name} {kind}\nvllm:{name}{labels} {float(value)}\n"
        for name, kind, value in rows
    ).encode()


def model_card(model: str, context_tokens: int) -> dict[str, Any]:
    """Build one entry of GET /v1/models."""
    return {
        "id": model,
        "object": "model",
        "created": _CREATED,
        "owned_by": "fake-node",
        "root": model,
        "parent": None,
        "max_model_len": context_tokens,
    }
