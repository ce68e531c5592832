"""What a client is told when the gateway itself answers, in place of a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.errors import ApiError

if TYPE_CHECKING:
    from app.errors import AttemptFailed
    from app.gateway.inspect import Call
    from app.gateway.routes import Route
    from app.model import Refusal

ENDING = ApiError(
    503, "The gateway ends.", kind="server_error", code="shutting_down", retry_after_s=1
)
COMPRESSED = ApiError(
    415,
    "The body must not be compressed: send no Content-Encoding.",
    kind="invalid_request_error",
    code="unsupported_media_type",
    headers=[(b"accept-encoding", b"identity")],
)


def not_allowed(method: str, route: Route) -> ApiError:
    """The route is there, for POST."""
    return ApiError(
        405,
        f"{method} is not allowed on {route.path}; use POST.",
        kind="invalid_request_error",
        code="method_not_allowed",
        allow="POST",
    )


def refused(call: Call, refusal: Refusal) -> ApiError:
    """No node was found."""
    if refusal.reason == "unknown":
        return ApiError(
            404,
            f"The model {call.asked_model!r} does not exist.",
            kind="invalid_request_error",
            param="model",
            code="model_not_found",
        )
    full = refusal.reason == "full"
    return ApiError(
        429 if full else 503,
        f"Every node that serves {call.asked_model!r} is "
        + ("at capacity." if full else "unavailable."),
        kind="rate_limit_error" if full else "server_error",
        code="at_capacity" if full else "no_node_available",
        retry_after_s=max(refusal.retry_ms, 1000) / 1000,
        headers=[(b"x-leaseway-degraded", b"1")] if refusal.degraded else None,
    )


def gave_up(failure: AttemptFailed) -> ApiError:
    """Nodes were tried, and none has given an answer of its own."""
    return ApiError(
        failure.status,
        f"No node could answer; the last attempt ended with: {failure.kind}.",
        kind="upstream_error",
        code=failure.kind,
        retry_after_s=1,
    )
