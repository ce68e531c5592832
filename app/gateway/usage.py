"""Ask the node for the token counts of a stream, where the client did not say.

What it said is never overruled; what the option adds is taken out again by the observer.
``stream_options``: https://platform.openai.com/docs/api-reference/chat/create.
"""

from __future__ import annotations

from typing import Any

from app.gateway.splice import add_member, replace_value, spans

_MEMBER = b'"include_usage":true'
_ASKED = b"{" + _MEMBER + b"}"


def with_usage_asked(body: bytes, fields: dict[str, Any]) -> bytes | None:
    """``body``, parsed as ``fields``, with ``include_usage``; None when the client has said."""
    options = fields.get("stream_options")
    if options is None:
        if "stream_options" not in fields:
            return add_member(body, b'"stream_options":' + _ASKED)
        return replace_value(body, "stream_options", _ASKED)
    if not isinstance(options, dict) or options.get("include_usage") is not None:
        return None
    begin, end = list(spans(body, "stream_options"))[-1]  # of several, parsers take the last
    said = body[begin:end]
    more = replace_value(said, "include_usage", b"true")
    if more == said:
        more = add_member(said, _MEMBER)
    return b"".join((memoryview(body)[:begin], more, memoryview(body)[end:]))
