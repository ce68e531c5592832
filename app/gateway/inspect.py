"""What routing needs from a request, and nothing more.

The body is parsed once, for ``model``, ``stream`` and sizes; its bytes go to the node as they
came. Only an alias changes them, in place: every other byte stays (BerriAI/litellm#20246).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson

from app.errors import ApiError, bad_request

# Rough, and the same for all nodes: a token is four bytes of text (OpenAI's rule of thumb).
_BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Route:
    """One forwarded endpoint. ``decodes``: answers are generated token by token."""

    path: str
    decodes: bool = True


ROUTES = {
    route.path: route
    for route in (
        Route("/v1/chat/completions"),
        Route("/v1/completions"),
        Route("/v1/embeddings", decodes=False),
    )
}


@dataclass(slots=True)  # made for every request: frozen would cost four times as much
class Call:
    """A request, inspected: ``model`` is the served name, ``body`` what goes to the node."""

    route: Route
    asked_model: str
    model: str
    stream: bool
    prompt_tokens: int
    body: bytes


def inspect(route: Route, content_type: bytes, body: bytes, aliases: dict[str, str]) -> Call:
    """Read a JSON request. Raises ``ApiError`` (400, 415) that names the field at fault."""
    if content_type.split(b";", 1)[0].strip().lower() != b"application/json":
        raise ApiError(
            415,
            "The body must be JSON: send Content-Type: application/json.",
            kind="invalid_request_error",
            code="unsupported_media_type",
        )
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        what = "empty" if not body.strip() else f"not valid JSON: {exc}"
        raise bad_request(f"The body is {what}.", code="invalid_json") from exc
    if not isinstance(fields, dict):
        raise bad_request("The body must be a JSON object.", code="invalid_json")
    asked = _model(fields)
    stream = fields.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise bad_request("'stream' must be true or false.", param="stream", code="invalid_type")
    model = aliases.get(asked, asked)
    return Call(
        route=route,
        asked_model=asked,
        model=model,
        stream=bool(stream),
        prompt_tokens=max(1, len(body) // _BYTES_PER_TOKEN),
        body=body if model == asked else replace_value(body, "model", model),
    )


def _model(fields: dict[str, Any]) -> str:
    model = fields.get("model")
    if model is None:
        raise bad_request("'model' is required.", param="model", code="missing_required_parameter")
    if not isinstance(model, str):
        raise bad_request("'model' must be a string.", param="model", code="invalid_type")
    if not model or "\n" in model or len(model) > 256:
        raise bad_request(
            "'model' must be a name of 1 to 256 characters.", param="model", code="invalid_value"
        )
    return model


_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\],:]', re.DOTALL)


def replace_value(body: bytes, key: str, value: str) -> bytes:
    """``body`` with the string value of the top-level ``key`` replaced; all else untouched.

    ``body`` is a valid JSON object. A key given twice is replaced each time, so that every
    parser at the node agrees on it.
    """
    pieces: list[bytes] = []
    copied = depth = 0
    name, colon = b"", False
    for token in _TOKEN.finditer(body):
        text = token.group()
        if text[:1] == b'"':
            if depth == 1 and colon and name and orjson.loads(name) == key:
                pieces += [body[copied : token.start()], orjson.dumps(value)]
                copied = token.end()
            elif depth == 1 and not colon:
                name = text
        elif text in b"{[":
            depth += 1
        elif text in b"}]":
            depth -= 1
        elif text == b":":
            colon = colon or depth == 1
        elif depth == 1:  # a comma between two members
            name, colon = b"", False
    return b"".join([*pieces, body[copied:]])
