"""K2: framing headers belong to the hop; end-to-end headers pass, each time they were given."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import redis

from tests.cases.conftest import small_settings
from tests.support import state
from tests.support.rawclient import RawClient
from tests.support.rawnode import COMPLETION, RawNode, chunk, json_answer, raw_answer, sized
from tests.support.rawnode import events as answer_of
from tests.support.servers import Gateway, ValkeyServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.rawnode import Headers

HOP = {
    b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect",
    b"proxy-authorization", b"proxy-authenticate", b"proxy-connection", b"x-of-this-hop",
}  # fmt: skip
REQUEST_HEADERS: Headers = [
    (b"Host", b"gw.example"),
    (b"Connection", b"keep-alive, TE, X-Of-This-Hop"),
    (b"Keep-Alive", b"timeout=5"),
    (b"TE", b"trailers"),
    (b"Proxy-Authorization", b"Basic eDp5"),
    (b"Proxy-Connection", b"keep-alive"),
    (b"X-Of-This-Hop", b"1"),
    (b"Content-Type", b"application/json; charset=utf-8"),
    (b"X-Request-Id", b"req-1"),
    (b"Traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    (b"X-Tag", b"one"),
    (b"X-Tag", b"two"),
    (b"X-Empty", b""),
    (b"User-Agent", b"case/1"),
]
BODY = (
    '{"model" : "public", "stream_options":{"include_usage": true}, "messages":[{"content":"日"}]}'
)


def request(more: Headers | None = None, *, body: str = BODY) -> bytes:
    raw = body.encode()
    lines = [n + b": " + v for n, v in [*REQUEST_HEADERS, *(more or [])]]
    head = [b"POST /v1/chat/completions HTTP/1.1", *lines, b"content-length: %d" % len(raw)]
    return b"\r\n".join(head) + b"\r\n\r\n" + raw


class HeaderClient(RawClient):
    """A client that keeps every header of the final answer, in order; ``interim`` counts 1xx."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.listed: Headers = []
        self.interim = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self.listed.append((name.lower(), value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            super().on_message_complete()
        else:
            self.interim += 1
            self.listed.clear()

    def count(self, name: bytes) -> int:
        return sum(n == name for n, _ in self.listed)

    def values(self, name: bytes) -> list[bytes]:
        return [v for n, v in self.listed if n == name]


@dataclass(frozen=True)
class Bench:
    """One replica over one node, for all tests of this file; ``valkey`` reads their Redis."""

    gw: Gateway
    node: RawNode
    valkey: redis.Redis


@pytest.fixture(scope="module")
def started() -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ValkeyServer())
        valkey = stack.enter_context(redis.Redis(port=server.port, decode_responses=True))
        node = stack.enter_context(RawNode())
        settings = {**small_settings([node]), "aliases": {"public": "m"}}
        gw = stack.enter_context(Gateway(settings, server.url))
        yield Bench(gw, node, valkey)
        assert gw.stop() == 0
        assert "Traceback" not in gw.log, gw.log


@pytest.fixture
def bench(started: Bench) -> Bench:
    """The bench with a node that answers well and has seen nothing."""
    started.node.script = json_answer()
    started.node.requests.clear()
    return started


def assert_clean_at_the_node(node: RawNode) -> None:
    """The last request: its own host, one exact length, none of the client's hop headers."""
    seen = node.requests[-1]
    names = Counter(name.lower() for name, _ in seen.headers)
    assert seen.header(b"host") == node.url.removeprefix("http://").encode()
    assert names[b"host"] == 1
    assert names[b"content-length"] == 1
    assert seen.header(b"content-length") == str(len(seen.body)).encode()
    assert not names.keys() & HOP
    assert seen.body == BODY.replace("public", "m").encode()


def test_the_node_sees_its_own_host_one_length_and_no_hop_header(bench: Bench) -> None:
    gw, node = bench.gw, bench.node
    with HeaderClient(gw.port) as client:
        client.send(request())
        assert json.loads(client.read_all()) == COMPLETION
    assert_clean_at_the_node(node)
    seen = node.requests[0]
    # End-to-end headers pass as they came, repeated ones in order.
    assert seen.header(b"x-request-id") == b"req-1"
    assert seen.header(b"traceparent") == dict(REQUEST_HEADERS)[b"Traceparent"]
    assert seen.header(b"content-type") == b"application/json; charset=utf-8"
    assert seen.header(b"user-agent") == b"case/1"
    assert seen.header(b"x-empty") == b""
    assert [v for n, v in seen.headers if n.lower() == b"x-tag"] == [b"one", b"two"]


def test_expect_is_answered_by_the_gateway_and_not_passed_on(bench: Bench) -> None:
    gw, node = bench.gw, bench.node
    head, _, body = request([(b"Expect", b"100-continue")]).partition(b"\r\n\r\n")
    with HeaderClient(gw.port) as client:
        client.send(head + b"\r\n\r\n")
        while not client.interim:  # the body is held back until the gateway asks for it
            client._read()
        assert not client.ended
        client.send(body)
        client.read_all()
        assert (client.status, client.interim) == (200, 1)
    assert_clean_at_the_node(node)


def test_an_upgrade_is_not_passed_on(bench: Bench) -> None:
    gw, node = bench.gw, bench.node
    asks = [(b"Connection", b"Upgrade, HTTP2-Settings"), (b"Upgrade", b"h2c")]
    with HeaderClient(gw.port) as client:
        client.send(request([*asks, (b"HTTP2-Settings", b"AAMAAABk")]))
        client.read_all()
        assert client.status == 200
    assert_clean_at_the_node(node)
    assert node.requests[0].header(b"http2-settings") is None


def test_a_chunked_request_gets_one_length(bench: Bench) -> None:
    gw, node = bench.gw, bench.node
    raw = BODY.encode()
    head = request().partition(b"content-length")[0] + b"transfer-encoding: chunked\r\n\r\n"
    with HeaderClient(gw.port) as client:
        client.send(head + chunk(raw[:20]) + chunk(raw[20:]) + b"0\r\n\r\n")
        client.read_all()
        assert client.status == 200
    assert_clean_at_the_node(node)


END_TO_END: Headers = [
    (b"x-ratelimit-remaining-requests", b"9"),
    (b"x-ratelimit-reset-tokens", b"6m0s"),
    (b"traceresponse", b"00-a-b-01"),
    (b"x-tag", b"one"),
    (b"x-tag", b"two"),
    (b"link", b"<a>; rel=next"),
]
HOP_OF_THE_NODE: Headers = [
    (b"connection", b"close, x-of-this-hop"),
    (b"keep-alive", b"timeout=5, max=1"),
    (b"proxy-authenticate", b"Basic"),
    (b"trailer", b"x-later"),
    (b"x-of-this-hop", b"1"),
    (b"x-request-id", b"the node's own"),
]
JSON_TYPE: Headers = [(b"content-type", b"application/json")]
PAYLOAD = json.dumps(COMPLETION).encode()
STREAM = b"".join(answer_of(3))


def chunked(content_type: bytes, *parts: bytes) -> bytes:
    headers = [(b"content-type", content_type), *END_TO_END, *HOP_OF_THE_NODE]
    lines = [
        b"HTTP/1.1 200 OK",
        b"transfer-encoding: chunked",
        *(n + b": " + v for n, v in headers),
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + b"".join(map(chunk, parts)) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (sized(200, PAYLOAD, [*JSON_TYPE, *END_TO_END, *HOP_OF_THE_NODE]), PAYLOAD),
        (chunked(b"application/json", PAYLOAD[:50], PAYLOAD[50:]), PAYLOAD),
        (chunked(b"text/event-stream", STREAM[:50], STREAM[50:]), STREAM),
        (sized(200, STREAM, [(b"content-type", b"text/event-stream"), *END_TO_END]), STREAM),
        (sized(422, PAYLOAD, [*JSON_TYPE, *END_TO_END, *HOP_OF_THE_NODE]), PAYLOAD),
    ],
    ids=["JSON with a length", "JSON in chunks", "events in chunks", "events with a length", "422"],
)
def test_the_client_sees_one_consistent_frame(bench: Bench, answer: bytes, body: bytes) -> None:
    bench.node.script = raw_answer(answer)
    with HeaderClient(bench.gw.port) as client:
        client.send(request())
        assert client.read_all() == body
        assert client.complete
    assert client.status == int(answer.split(b" ")[1])
    assert client.count(b"content-length") + client.count(b"transfer-encoding") == 1
    assert client.values(b"content-length") in ([], [str(len(body)).encode()])
    assert not {name for name, _ in client.listed} & (HOP - {b"transfer-encoding"})
    for name in {name for name, _ in END_TO_END}:
        assert client.values(name) == [v for n, v in END_TO_END if n == name]
    assert client.values(b"x-request-id") == [b"req-1"]
    assert client.count(b"content-type") == 1


def test_hop_headers_end_here_whether_connection_names_them_or_not(bench: Bench) -> None:
    plain = request().replace(b"keep-alive, TE, X-Of-This-Hop", b"keep-alive")
    plain = plain.replace(b"X-Of-This-Hop: 1\r\n", b"Trailer: x\r\nUpgrade: h2c\r\n")
    bench.node.script = raw_answer(
        sized(
            200,
            PAYLOAD,
            [*JSON_TYPE, *((n, b"x") for n in HOP - {b"connection", b"transfer-encoding"})],
        )
    )
    with HeaderClient(bench.gw.port) as client:
        client.send(plain)
        assert client.read_all() == PAYLOAD
    assert_clean_at_the_node(bench.node)
    # Expect is a request's, and x-of-this-hop is nobody's unless it is named.
    assert {name for name, _ in client.listed} & HOP == {b"expect", b"x-of-this-hop"}


# Answers that have no body


@pytest.fixture
def kept(bench: Bench) -> Iterator[http.client.HTTPConnection]:
    """A client connection that is used again and again."""
    connection = http.client.HTTPConnection("127.0.0.1", bench.gw.port, timeout=2)
    connection.connect()
    yield connection
    connection.close()


def exchange(
    connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None
) -> tuple[http.client.HTTPResponse, bytes]:
    """One request on this very connection, which stays open after it."""
    sock = connection.sock
    assert sock is not None
    headers = {"content-type": "application/json"} if body else {}
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    content = answer.read()
    assert connection.sock is sock, "the connection was closed"
    return answer, content


CALL = b'{"model":"m","messages":[]}'
EMPTY = {
    "204": b"HTTP/1.1 204 No Content\r\nx-a: 1\r\n\r\n",
    "304": b'HTTP/1.1 304 Not Modified\r\netag: "x"\r\nx-a: 1\r\n\r\n',
    "304 with the length that a 200 would have": (
        b"HTTP/1.1 304 Not Modified\r\ncontent-length: 1234\r\nx-a: 1\r\n\r\n"
    ),
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_answer_without_a_body_ends_at_once_and_the_connection_stays_usable(
    kept: http.client.HTTPConnection, bench: Bench, name: str
) -> None:
    node, valkey = bench.node, bench.valkey
    good = node.script
    for _ in range(3):
        node.script = raw_answer(EMPTY[name], keep_alive=True)
        answer, content = exchange(kept, "POST", "/v1/chat/completions", CALL)
        assert answer.status == int(name[:3])
        assert content == b""
        assert answer.getheader("transfer-encoding") is None
        assert answer.getheader("x-a") == "1"
        node.script = good
        answer, content = exchange(kept, "POST", "/v1/chat/completions", CALL)
        assert (answer.status, json.loads(content)) == (200, COMPLETION)
    wait_until(lambda: state.unloaded(valkey), within_s=2, what="load = 0")
    assert state.record(valkey, "b1")["streak"] == "0"
    # The node's connection was usable as well: all six went over one.
    assert len({request.connection for request in node.requests}) == 1


def test_head_ends_at_once_without_a_body_and_the_connection_stays_usable(
    kept: http.client.HTTPConnection, bench: Bench
) -> None:
    _, listed = exchange(kept, "GET", "/v1/models")
    for path in ("/v1/models", "/v1/models/m", "/healthz", "/nothing", "/v1/chat/completions"):
        answer, content = exchange(kept, "HEAD", path)
        assert content == b""
        assert answer.getheader("content-type") == "application/json"
        again, body = exchange(kept, "GET", path)
        # HEAD is GET without the body (RFC 9110, 9.3.2), on a path that takes POST only as well.
        assert answer.status == again.status, path
        assert again.getheader("content-length") == str(len(body))
        if again.status != 405:  # whose message names the method
            assert answer.getheader("content-length") == str(len(body))
    assert [model["id"] for model in json.loads(listed)["data"]] == ["m", "public"]
    answer, content = exchange(kept, "POST", "/v1/chat/completions", CALL)
    assert (answer.status, json.loads(content)) == (200, COMPLETION)
    assert len(bench.node.requests) == 1
