"""One attempt on one node: open it, and look at the answer before the client sees any of it.

What an answer means for the node is decided here and nowhere else: status, first event,
error objects inside a 200. Until ``attempt`` returns, a failure may go to another node.
"""

from __future__ import annotations

from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from app.cluster.engines import node_key
from app.errors import AttemptFailed
from app.gateway.connection import Broken, Headers
from app.gateway.observe import EventStream, JsonBody
from app.model import Node, Outcome

if TYPE_CHECKING:
    from app.gateway.connection import NodeConnection
    from app.gateway.forward import Forward
    from app.gateway.inspect import Call

# Hop-by-hop (RFC 9110, 7.6.1), and what belongs to the hop between client and gateway.
_HOP = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
        b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
    )
)  # fmt: skip
# The caller's credentials end here; the observer needs plain bytes.
_NOT_TO_NODE = _HOP | {
    b"host", b"content-length", b"expect", b"authorization", b"x-api-key", b"api-key", b"cookie",
    b"accept-encoding", b"x-leaseway-explain", b"x-request-id",
}  # fmt: skip
_NOT_TO_CLIENT = _HOP | {b"date", b"x-request-id", b"x-accel-buffering", b"set-cookie"}
_NOT_WITH_EVENTS = _NOT_TO_CLIENT | {b"content-length", b"cache-control"}
_HOLD_BYTES = 256 * 1024  # a one-piece answer up to this size is sent only when it is whole
_COOL_DEFAULT_MS, _COOL_MAX_MS = 1000, 60_000
_BUSY_WORDS = (b"overloaded", b"loading model", b"unavailable_error", b"busy", b"queue is full")


class AnsweredBadly(AttemptFailed):
    """The node answered, with a status that another node may do better than.

    ``answer`` is that answer, for the client in case no other node can be tried.
    """

    def __init__(
        self, outcome: Outcome, kind: str, message: str, answer: Answer, *, cool_ms: int = 0
    ) -> None:
        super().__init__(outcome, kind, message, cool_ms=cool_ms)
        self.answer = answer


@dataclass(slots=True)
class Answer:
    """An answer that may go to the client: status, end-to-end headers, what was read so far."""

    connection: NodeConnection
    status: int
    headers: Headers
    observed: EventStream | JsonBody
    ready: bytes = b""

    @property
    def streaming(self) -> bool:
        """Whether this is an event stream."""
        return isinstance(self.observed, EventStream)

    @property
    def complete(self) -> bool:
        """Whether what has all been read is whole. A stream that only the close ends must say
        itself that it is (``[DONE]`` or a finish): the close could be the node's death."""
        return self.connection.sized or not self.streaming or self.observed.ended


async def attempt(
    forward: Forward, node: Node, call: Call, target: bytes, headers: Headers
) -> Answer:
    """Ask ``node``. Raises ``AttemptFailed``; on any exception the connection is closed or,
    inside ``AnsweredBadly``, handed over with the answer."""
    connection = await forward.open(node, b"POST", target, _with_node_key(node, headers), call.body)
    try:
        answer = _answer(connection)
        try:
            return await _looked_at(node, answer)
        except Broken as exc:
            raise AttemptFailed(Outcome.FAILED, exc.kind, f"node {node.id}: {exc}") from exc
    except AnsweredBadly:
        raise
    except BaseException:
        connection.abort()
        raise


def to_node(client_headers: Headers, request_id: bytes) -> Headers:
    """The client's end-to-end headers, for a node; ``authorization`` is the node's own affair."""
    headers = _without(client_headers, _NOT_TO_NODE)
    headers += [(b"accept-encoding", b"identity"), (b"x-request-id", request_id)]
    return headers


def _with_node_key(node: Node, headers: Headers) -> Headers:
    key = node_key(node)
    return [*headers, (b"authorization", b"Bearer " + key.encode())] if key else headers


def _without(headers: Headers, dropped: frozenset[bytes]) -> Headers:
    """``headers`` without ``dropped`` and without what ``Connection`` names (RFC 9110, 7.6.1)."""
    for name, value in headers:
        if name == b"connection" and value.lower() not in {b"keep-alive", b"close"}:
            dropped = dropped | {token.strip().lower() for token in value.split(b",")}
    return [header for header in headers if header[0] not in dropped]


def _answer(connection: NodeConnection) -> Answer:
    status, raw = connection.status, connection.headers
    content_type = next((v for n, v in raw if n == b"content-type"), b"")
    events = status == 200 and content_type.lower().startswith(b"text/event-stream")
    if not events:
        # A 304 may give the length that a 200 would have (RFC 9110, 8.6); its own body has none.
        dropped = _NOT_TO_CLIENT | {b"content-length"} if status in {204, 304} else _NOT_TO_CLIENT
        return Answer(connection, status, _without(raw, dropped), JsonBody())
    headers = _without(raw, _NOT_WITH_EVENTS)
    headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
    return Answer(connection, status, headers, EventStream())


async def _looked_at(node: Node, answer: Answer) -> Answer:
    connection, observed = answer.connection, answer.observed
    if answer.status >= 500 or answer.status == 429:
        answer.ready = observed.feed(await connection.read())
        raise _bad_status(node, answer)
    if answer.status >= 300:
        answer.ready = observed.feed(await connection.read())
        return answer
    parts: list[bytes] = []
    held = 0
    while not (held > _HOLD_BYTES if isinstance(observed, JsonBody) else observed.committed):
        chunk = await connection.read()
        if not chunk:
            parts.append(observed.rest())
            break
        parts.append(observed.feed(chunk))
        held += len(chunk)
    answer.ready = b"".join(parts)
    if observed.error is not None:
        message = f"node {node.id}: 200 with an error: {observed.error[:200]}"
        raise AnsweredBadly(Outcome.FAILED, "error_event", message, answer)
    if not answer.ready and answer.status != 204:
        raise AttemptFailed(Outcome.FAILED, "empty", f"node {node.id}: 200 without a body")
    return answer


def _bad_status(node: Node, answer: Answer) -> AnsweredBadly:
    retry_after = next((v for n, v in answer.headers if n == b"retry-after"), None)
    busy = answer.status == 429 or (
        answer.status == 503
        and (
            retry_after is not None
            or any(word in answer.ready[:4096].lower() for word in _BUSY_WORDS)
        )
    )
    message = f"node {node.id} answered {answer.status}"
    kind = f"status_{answer.status}"
    if busy:
        return AnsweredBadly(
            Outcome.SATURATED, kind, message, answer, cool_ms=_cool_ms(retry_after)
        )
    return AnsweredBadly(Outcome.FAILED, kind, message, answer)


def _cool_ms(retry_after: bytes | None) -> int:
    """``Retry-After`` in ms, seconds or date (RFC 9110, 10.2.3), bounded."""
    if retry_after is None:
        return _COOL_DEFAULT_MS
    text = retry_after.decode("latin-1").strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            at = parsedate_to_datetime(text)
        except ValueError:
            return _COOL_DEFAULT_MS
        from datetime import UTC, datetime

        seconds = (at - datetime.now(UTC)).total_seconds() if at.tzinfo else 1.0
    if not seconds > 0:  # also NaN
        return _COOL_DEFAULT_MS
    return int(min(seconds * 1000, _COOL_MAX_MS))
