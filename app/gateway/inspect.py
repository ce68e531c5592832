"""What routing needs from a request, and nothing more.

The body is parsed once, for ``model``, ``stream`` and sizes; its bytes go to the node as they
came. Only an alias and the question for token counts change them, in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from app.errors import ApiError, bad_request
from app.gateway.estimate import NO_SIZE, Size, measure
from app.gateway.form import read_fields
from app.gateway.splice import replace_value
from app.gateway.usage import with_usage_asked

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.gateway.routes import Route

_MOST = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_FORM_FIELDS = frozenset((b"model", b"stream"))


@dataclass(slots=True)  # made for every request: frozen would cost four times as much
class Call:
    """A request, inspected: ``model`` is the served name, ``body`` what goes to the node.

    ``size`` is what its prompt consists of; ``max_output_tokens`` is the most that the client
    wants generated, 0 when it does not say; ``hides_usage``: the gateway has asked for the usage
    event, and the client has not. ``fields`` is the parsed body of a route that generates, for
    whoever takes it away: it is as large as the body.
    """

    route: Route
    asked_model: str
    model: str
    stream: bool
    size: Size
    max_output_tokens: int
    body: bytes
    hides_usage: bool = False
    fields: dict[str, Any] | None = None


def inspect(
    route: Route,
    content_type: bytes,
    body: bytes,
    aliases: dict[str, str],
    served: Callable[[], list[str]] = list,
    *,
    ask_usage: bool = False,
) -> Call:
    """Read a request. ``served`` gives the models that nodes have.

    Raises ``ApiError`` (400, 415) that names the field at fault.
    """
    if route.form:
        return _form_call(route, content_type, body, aliases)
    fields = _json(content_type, body)
    given = fields.get("model")
    asked = _the_only(served()) if given is None and route.any_model else _name(given)
    stream = fields.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise bad_request("'stream' must be true or false.", param="stream", code="invalid_type")
    model = aliases.get(asked, asked) if given is not None else asked
    call = Call(
        route=route,
        asked_model=asked,
        model=model,
        stream=bool(stream),
        size=measure(fields),
        max_output_tokens=_most(fields),
        body=body if model == asked else replace_value(body, "model", orjson.dumps(model)),
        fields=fields if route.ttft == "first" else None,
    )
    if ask_usage and stream and route.usage:
        asking = with_usage_asked(call.body, fields)
        if asking is not None:
            call.body, call.hides_usage = asking, True
    return call


def _json(content_type: bytes, body: bytes) -> dict[str, Any]:
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
    return fields


def _form_call(route: Route, content_type: bytes, body: bytes, aliases: dict[str, str]) -> Call:
    fields = read_fields(content_type, body, _FORM_FIELDS)
    given = fields.get(b"model")
    try:
        asked = _name(given and given.value.decode())
    except UnicodeDecodeError as exc:
        raise bad_request("'model' must be UTF-8.", param="model", code="invalid_value") from exc
    model = aliases.get(asked, asked)
    if given is not None and model != asked:
        body = body[: given.begin] + model.encode() + body[given.end :]
    stream = fields[b"stream"].value if b"stream" in fields else b""
    return Call(route, asked, model, stream.lower() in {b"true", b"1"}, NO_SIZE, 0, body)


def _most(fields: dict[str, Any]) -> int:
    given = [fields.get(name) for name in _MOST if name in fields]
    return max((most for most in given if type(most) is int and most > 0), default=0)


def _the_only(served: list[str]) -> str:
    if len(served) != 1:
        raise bad_request(
            "'model' is required: more than one model is served, or none.",
            param="model",
            code="missing_required_parameter",
        )
    return served[0]


def _name(model: Any) -> str:
    if model is None:
        raise bad_request("'model' is required.", param="model", code="missing_required_parameter")
    if not isinstance(model, str):
        raise bad_request("'model' must be a string.", param="model", code="invalid_type")
    if not model or "\n" in model or len(model) > 256:
        raise bad_request(
            "'model' must be a name of 1 to 256 characters.", param="model", code="invalid_value"
        )
    return model
