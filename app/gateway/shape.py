"""How an error of the gateway reads, in the shape that the clients of a route expect.

OpenAI: https://platform.openai.com/docs/guides/error-codes, its Responses API: the ``error``
event of https://platform.openai.com/docs/api-reference/responses-streaming, Anthropic:
https://docs.anthropic.com/en/api/errors.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from app.errors import ApiError


class Shape(StrEnum):
    """Whose shape errors have on a route."""

    OPENAI = "openai"
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: ApiError, shape: Shape = Shape.OPENAI) -> bytes:
    """The JSON body of an error answer.

    OpenAI: ``{"error": {"message", "type", "param", "code"}}``; Anthropic:
    ``{"type": "error", "error": {"type", "message"}}``.
    """
    return orjson.dumps(_anthropic(error) if shape == Shape.ANTHROPIC else _openai(error))


def error_event(error: ApiError, shape: Shape) -> bytes:
    """One SSE event that ends a stream which had begun."""
    if shape == Shape.OPENAI:
        return b"data: " + orjson.dumps(_openai(error)) + b"\n\n"
    if shape == Shape.ANTHROPIC:
        said = _anthropic(error)
    else:  # the event's own fields, and the object that makes SDKs raise
        said = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        said |= _openai(error)
    return b"event: error\ndata: " + orjson.dumps(said) + b"\n\n"


def _openai(error: ApiError) -> dict[str, Any]:
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def _anthropic(error: ApiError) -> dict[str, Any]:
    ours = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(error.status, ours)
    return {"type": "error", "error": {"type": kind, "message": error.message}}
