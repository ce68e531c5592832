"""One attempt on one node: open it, and look at the answer before the client sees any of it.

What an answer means for the node is decided here and nowhere else: status, first event,
error objects inside a 200. Until ``attempt`` returns, a failure may go to another node.
"""

from __future__ import annotations

from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from app.cluster.engines import node_key, without_key
from app.errors import AttemptFailed
from app.gateway.connection import Broken, Headers
from app.gateway.observe import EventStream, JsonBody, observer
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
    b"origin", b"access-control-request-method", b"access-control-request-headers",
}  # fmt: skip
# Cookies of a node and what it allows to pages of other sites are not the gateway's.
_NOT_TO_CLIENT = _HOP | {
    b"date", b"x-request-id", b"x-accel-buffering", b"set-cookie", b"access-control-allow-origin",
    b"access-control-allow-credentials", b"access-control-allow-headers",
    b"access-control-allow-methods", b"access-control-expose-headers", b"access-control-max-age",
}  # fmt: skip
_NOT_WITH_EVENTS = _NOT_TO_CLIENT | {b"content-length", b"cache-control"}
_HOLD_BYTES = 256 * 1024  # a one-piece answer up to this size is sent only when it is whole
_COOL_DEFAULT_MS, _COOL_MAX_MS = 1000, 60_000
_BUSY_WORDS = (b"overloaded", b"loading", b"unavailable_error", b"busy", b"queue is full")


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
    """An answer that may go to the client: status, end-to-end headers, what was read so far.

    ``judged``: all of it has been read and observed; ``booked``: it was answered badly, and its
    attempt has been counted as that.
    """

    connection: NodeConnection
    status: int
    headers: Headers
    observed: EventStream | JsonBody
    ready: bytes = b""
    judged: bool = False
    booked: bool = False

    @property
    def streaming(self) -> bool:
        """Whether this is an event stream."""
        return isinstance(self.observed, EventStream)

    @property
    def at_end(self) -> bool:
        """Whether all of it has been read."""
        return self.judged or (self.connection.complete and not self.connection.unread)

    @property
    def complete(self) -> bool:
        """Whether what has all been read is whole. An answer that only the close ends must say
        itself that it is (``[DONE]``, a finish, JSON's last bracket): the close could be the
        node's death."""
        return self.connection.sized or self.observed.ended

    def rest(self) -> bytes:
        """What was held back, when all has been read."""
        if self.judged:
            return b""
        self.judged = True
        return self.observed.rest()


async def attempt(
    forward: Forward, node: Node, call: Call, target: bytes, headers: Headers
) -> Answer:
    """Ask ``node``. Raises ``AttemptFailed``; on any exception the connection is closed or,
    inside ``AnsweredBadly``, handed over with the answer."""
    connection = await forward.open(node, b"POST", target, _with_node_key(node, headers), call.body)
    connection.url = node.url
    try:
        answer = _answer(connection, call)
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


def _answer(connection: NodeConnection, call: Call) -> Answer:
    status, raw = connection.status, connection.headers
    named = dict(reversed(raw))
    content_type = named.get(b"content-type", b"").lower()
    events = status == 200 and content_type.startswith(b"text/event-stream")
    observed = observer(
        named.get(b"content-encoding", b""),
        events=events,
        json=b"json" in content_type,
        hide_usage=call.hides_usage,
    )
    if not events:
        # A 304 may give the length that a 200 would have (RFC 9110, 8.6); its own body has none.
        dropped = _NOT_TO_CLIENT | {b"content-length"} if status in {204, 304} else _NOT_TO_CLIENT
        return Answer(connection, status, _without(raw, dropped), observed)
    headers = _without(raw, _NOT_WITH_EVENTS)
    headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
    return Answer(connection, status, headers, observed)


async def _looked_at(node: Node, answer: Answer) -> Answer:
    """Read as much as tells whether the answer is good; all of it, where it is short JSON."""
    connection, observed = answer.connection, answer.observed
    if answer.status >= 300:
        answer.ready = observed.feed(await connection.read())
        if answer.status >= 500 or answer.status == 429:
            raise _bad_status(node, answer)
        return answer
    parts: list[bytes] = []
    hold = _HOLD_BYTES if _is_text(answer.headers) else 0
    held = 0
    while not (observed.committed if isinstance(observed, EventStream) else held > hold):
        chunk = await connection.read()
        if not chunk:
            parts.append(answer.rest())
            if not answer.complete:
                raise Broken("truncated", "the node closed before the end of its answer")
            break
        parts.append(observed.feed(chunk))
        held += len(chunk)
    answer.ready = b"".join(parts)
    if observed.error is not None:
        message = f"node {node.id}: 200 with an error: {without_key(node, observed.error)}"
        raise AnsweredBadly(Outcome.FAILED, "error_event", message, answer)
    if not held and answer.status != 204:
        raise AttemptFailed(Outcome.FAILED, "empty", f"node {node.id}: 200 without a body")
    if answer.judged and not answer.streaming and not observed.ended:
        message = f"node {node.id}: 200 with a part of JSON"
        raise AnsweredBadly(Outcome.FAILED, "malformed", message, answer)
    return answer


def _is_text(headers: Headers) -> bool:
    """Whether an answer is held until its end is known. Audio is not: it is played as it comes."""
    kind = next((value for name, value in headers if name == b"content-type"), b"text/plain")
    return kind.lower().startswith((b"application/json", b"text/"))


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
