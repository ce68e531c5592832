"""I2: the node's status is looked at before the client sees 200."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import pytest

from tests.cases.bench import (
    MIB,
    Bench,
    Booked,
    PeakMemory,
    cut_every,
    in_pieces,
    renewed,
    running_bench,
)
from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import (
    STREAM_HEAD,
    Peer,
    Request,
    chunk,
    events,
    json_answer,
    raw_answer,
    sized,
)
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.rawnode import Headers, Script

# Outcome of an attempt that was answered so: the client's mistake, a busy node, a broken one.
STATUSES = {
    400: "rejected", 401: "rejected", 402: "rejected", 403: "rejected", 404: "rejected",
    405: "rejected", 409: "rejected", 413: "rejected", 415: "rejected", 418: "rejected",
    422: "rejected", 429: "saturated", 500: "failed", 501: "failed", 502: "failed",
    503: "failed", 504: "failed", 529: "failed",
}  # fmt: skip
HEADERS: Headers = [
    (b"content-type", b"application/json; charset=utf-8"),
    (b"x-ratelimit-remaining-requests", b"0"),
    (b"x-vendor", b"one"),
    (b"x-vendor", b"two"),
    (b"www-authenticate", b"Bearer"),
]
TOO_LONG = {
    "object": "error",
    "message": "This model's maximum context length is 4096 tokens.",
    "type": "BadRequestError",
    "param": None,
    "code": 400,
}


@pytest.fixture(scope="module")
def started() -> Iterator[Bench]:
    with running_bench(2) as bench:
        ask(bench.gw.port, chat(model="m1", stream=False))
        yield bench


@pytest.fixture
def bench(started: Bench) -> Bench:
    return renewed(started)


def _wait_usable(bench: Bench) -> None:
    """Until no node cools down any more."""
    wait_until(lambda: min(state.scores(bench.valkey).values()) > 0, what="nodes may be used")


def _answers(status: int, message: str = "x") -> Script:
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"0.01")]
    return json_answer(status, {"error": {"message": message, "type": "x"}}, headers)


def _bodies(status: int) -> dict[str, tuple[bytes, bytes | None]]:
    told = json.dumps({**TOO_LONG, "code": status}).encode()
    return {
        "JSON": (told, b"application/json"),
        "JSON in another shape": (b'{"detail" : [ "\xc3\xa9" ]}\n', b"application/problem+json"),
        "text": (b"upstream connect error \xff\xfe", b"text/plain"),
        "a page": (b"<html><h1>Bad</h1></html>\r\n", b"text/html; charset=latin-1"),
        "nothing": (b"", b"application/json"),
        "no content type": (told, None),
    }


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
def test_an_error_is_passed_as_it_is(bench: Bench, status: int, framing: str) -> None:
    head = b"HTTP/1.1 %d Whatever\r\n" % status
    for name, (body, kind) in _bodies(status).items():
        headers = [(n, v) for n, v in HEADERS if n != b"content-type"]
        headers += [(b"content-type", kind)] if kind else []
        headers += [(b"retry-after", b"0.01")] if status == 429 else []
        lines = b"".join(n + b": " + v + b"\r\n" for n, v in headers)
        if framing == "length":
            answer = raw_answer(sized(status, body, headers))
        else:
            answer = in_pieces(head + lines, cut_every(body, 20), sized=framing == "chunked")
        bench.node.script = answer
        before = bench.booked()
        client = ask(bench.gw.port, chat(model="m1", stream=True))
        assert client.complete, name
        assert (client.status, client.body) == (status, body), name
        assert client.headers.get(b"content-type") == kind, name
        assert client.headers[b"x-ratelimit-remaining-requests"] == b"0"
        assert client.headers[b"x-vendor"] == b"two"
        bench.wait_unloaded()
        booked = bench.booked() - before
        assert booked.ok == booked.samples == booked.output == 0, name
        assert (booked.failed, booked.saturated) == {
            "rejected": (0, 0), "saturated": (0, 1), "failed": (1, 0),
        }[STATUSES[status]], name  # fmt: skip
        _wait_usable(bench)
    assert len(bench.node.requests) == len(_bodies(status)), "never twice on the same node"


@pytest.mark.parametrize("status", [500, 503, 429])
def test_after_retries_it_is_the_answer_of_the_last_node(bench: Bench, status: int) -> None:
    order: list[str] = []
    for name, node in zip("ab", bench.nodes, strict=True):

        async def script(request: Request, peer: Peer, name: str = name) -> None:
            order.append(name)
            await _answers(status, f"no {name}")(request, peer)

        node.script = script
    client = ask(bench.gw.port, chat(model="m", stream=True))
    assert client.status == status
    assert client.headers[b"x-leaseway-attempts"] == b"2"
    assert len(order) == 2
    assert client.json()["error"]["message"] == f"no {order[-1]}"
    bench.wait_unloaded()
    _wait_usable(bench)


def test_a_mistake_of_the_client_is_not_asked_of_another_node(bench: Bench) -> None:
    for node in bench.nodes:
        node.script = json_answer(400, TOO_LONG)
    client = ask(bench.gw.port, chat(model="m", stream=True))
    assert (client.status, client.json()) == (400, TOO_LONG)
    assert sum(len(node.requests) for node in bench.nodes) == 1
    bench.wait_unloaded()


def test_nothing_goes_out_before_a_node_has_said_200(bench: Bench) -> None:
    may_answer, stages = threading.Event(), [b"HTTP/1.1 ", b"200 OK\r\ncontent-type: text/ev"]
    asked = threading.Event()

    async def script(request: Request, peer: Peer) -> None:
        for stage in stages:
            await peer.write(stage)
            await peer.sleep(0.05)
        asked.set()
        while not may_answer.is_set():
            await peer.sleep(0.002)
        await peer.write(b"ent-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        await peer.write(b"".join(map(chunk, events(3))) + b"0\r\n\r\n")

    bench.node.script = script
    with RawClient(bench.gw.port) as client:
        client.send(chat(model="m1", stream=True))
        assert asked.wait(5)
        client._socket.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client._read()
        client._socket.settimeout(10)
        may_answer.set()
        assert client.read_all() == b"".join(events(3))
        assert client.status == 200
    bench.wait_unloaded()


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n", b'{"choices":[],"id":"x"}'),
        (b"HTTP/1.1 201 Created\r\ncontent-type: text/plain\r\n", b"data: no event\n\n"),
    ],
    ids=["200 JSON", "201 text"],
)
def test_what_is_no_event_stream_is_not_called_one(bench: Bench, head: bytes, body: bytes) -> None:
    bench.node.script = in_pieces(head, [body])
    client = ask(bench.gw.port, chat(model="m1", stream=True))
    assert client.status == int(head[9:12])
    assert client.body == body
    assert b"content-type: " + client.headers[b"content-type"] in head
    bench.wait_unloaded()


def test_an_interim_answer_is_not_the_answer(bench: Bench) -> None:
    told = json.dumps(TOO_LONG).encode()
    interim = b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
    bench.node.script = raw_answer(interim + sized(400, told, HEADERS))
    client = ask(bench.gw.port, chat(model="m1", stream=True))
    assert (client.status, client.body) == (400, told)
    assert b"link" not in client.headers
    bench.wait_unloaded()


# An engine that echoed the input once for every error


@pytest.mark.parametrize("status", [400, 422, 429, 500, 503])
@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
def test_an_error_of_64_mib_takes_no_memory(bench: Bench, status: int, framing: str) -> None:
    block = b'{"loc":["body"],"input":"%b"},\n\n' % (b"x" * MIB)
    parts = [b'{"detail":[\n', *[block] * 64, b"{}]}"]
    size = sum(map(len, parts))

    async def script(request: Request, peer: Peer) -> None:
        line = {
            "length": b"content-length: %d" % size,
            "chunked": b"transfer-encoding: chunked",
            "close": b"connection: close",
        }[framing]
        peer.keep_alive = framing != "close"
        head = b"HTTP/1.1 %d No\r\ncontent-type: application/json\r\nretry-after: 0.01\r\n"
        await peer.write(head % status + line + b"\r\n\r\n")
        for part in parts:
            await peer.write(chunk(part) if framing == "chunked" else part)
        if framing == "chunked":
            await peer.write(b"0\r\n\r\n")

    bench.node.script = script
    got = 0
    with PeakMemory(bench.gw) as memory, RawClient(bench.gw.port) as client:
        client.send(chat(model="m1", stream=True))
        while not client.ended:
            client._read()
            got, client._body = got + len(client._body), bytearray()
        assert memory.grown < 16 * MIB
    print(f"RSS +{memory.grown / MIB:.1f} MiB for {got / MIB:.0f} MiB")
    assert (client.status, client.complete, got) == (status, True, size)
    bench.wait_unloaded()
    _wait_usable(bench)


@pytest.mark.parametrize("closed_after", [0, 1000, 300_000])
def test_an_error_that_is_cut_is_not_whole(bench: Bench, closed_after: int) -> None:
    body = b"x" * closed_after
    bench.node.script = raw_answer(
        b"HTTP/1.1 400 No\r\ncontent-type: text/plain\r\ncontent-length: 400000\r\n\r\n" + body
    )
    client = ask(bench.gw.port, chat(model="m1", stream=True))
    assert client.cut or client.status == 502
    bench.wait_unloaded()


@pytest.mark.parametrize("first", [500, 503, 429])
@pytest.mark.parametrize("second", [200, 400])
def test_the_next_node_decides(bench: Bench, first: int, second: int) -> None:
    seen: list[int] = []

    async def script(request: Request, peer: Peer) -> None:
        seen.append(first if not seen else second)
        if seen[-1] == 200:
            await in_pieces(STREAM_HEAD, events(3))(request, peer)
        else:
            await _answers(seen[-1])(request, peer)

    for node in bench.nodes:
        node.script = script
    before = bench.booked()
    client = ask(bench.gw.port, chat(model="m", stream=True))
    assert (client.status, seen) == (second, [first, second])
    assert (client.headers[b"content-type"] == b"text/event-stream") == (second == 200)
    bench.wait_unloaded()
    booked = bench.booked() - before
    assert booked.ok == (second == 200)
    assert Booked(failed=booked.failed, saturated=booked.saturated) == (
        Booked(failed=1) if first == 500 else Booked(saturated=1)  # 503 says when to come back
    )
    _wait_usable(bench)
