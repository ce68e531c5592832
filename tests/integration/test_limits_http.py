"""Limits of the HTTP front: sizes, patience, memory; HTTP/1.0 and 100-continue."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import pytest
import redis

from tests.cases.conftest import small_settings
from tests.support import state
from tests.support.rawclient import RawClient, ask, chat, post
from tests.support.rawnode import (
    COMPLETION,
    RawNode,
    chunk,
    events,
    json_answer,
    raw_answer,
    sse_answer,
    stream_forever,
)
from tests.support.servers import Gateway, ValkeyServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.rawnode import Peer, Request

MIB = 1024 * 1024
HEAD_S, BODY_S, IDLE_S = 1.0, 2.0, 2
CHAT_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\n"
BODY = b'{"model":"m","messages":[]}'


@dataclass(frozen=True)
class Bench:
    """One impatient replica over one node; ``valkey`` reads their Redis."""

    gw: Gateway
    node: RawNode
    valkey: redis.Redis


@pytest.fixture(scope="module")
def started() -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ValkeyServer())
        valkey = stack.enter_context(redis.Redis(port=server.port, decode_responses=True))
        node = stack.enter_context(RawNode())
        limits = {
            "body_limit_mib": 1,
            "header_timeout_s": HEAD_S,
            "body_timeout_s": BODY_S,
            "keep_alive_s": IDLE_S,
        }
        gw = stack.enter_context(Gateway(small_settings([node], server=limits), server.url))
        yield Bench(gw, node, valkey)
        assert gw.stop() == 0
        assert "Traceback" not in gw.log, gw.log


@pytest.fixture
def bench(started: Bench) -> Iterator[Bench]:
    """The bench with a node that answers well and has seen nothing; no lease may be left."""
    started.node.script = json_answer()
    started.node.requests.clear()
    yield started
    wait_until(lambda: state.unloaded(started.valkey), what="load = 0")


def assert_told(client: RawClient, status: int, code: str) -> None:
    """An error in the OpenAI shape, and the connection ends."""
    client.read_all()
    assert client.complete
    assert (client.status, client.json()["error"]["code"]) == (status, code)
    assert client.headers[b"connection"] == b"close"
    assert client._socket.recv(1) == b""


# Sizes


@pytest.mark.parametrize(
    "head",
    [
        CHAT_HEAD + b"x-a: " + b"b" * 70_000 + b"\r\ncontent-length: 27\r\n\r\n" + BODY,
        CHAT_HEAD + b"x-a: b\r\n" * 15_000 + b"\r\n",
        CHAT_HEAD + b"x-a: b\r\n" * 200 + b"content-length: 27\r\n\r\n" + BODY,
        b"POST /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: g\r\n\r\n",
        b"A" * 70_000,
        CHAT_HEAD + b"x-a: " + b"b" * 3_000_000,
    ],
    ids=["one header", "very many headers", "many headers", "target", "no end", "endless"],
)
def test_a_head_too_large_is_a_431_that_the_client_can_read(bench: Bench, head: bytes) -> None:
    with RawClient(bench.gw.port) as client:
        client.send(head)
        client.read_all()
        assert (client.status, client.json()["error"]["code"]) == (431, "headers_too_large")
        assert client.headers[b"connection"] == b"close"
    assert bench.node.requests == []


def test_a_head_of_a_hundred_headers_and_sixty_kilobytes_is_taken(bench: Bench) -> None:
    lines = b"".join(b"x-%d: %b\r\n" % (n, b"v" * 580) for n in range(100))
    client = ask(bench.gw.port, CHAT_HEAD + lines + b"content-length: 27\r\n\r\n" + BODY)
    assert client.status == 200
    assert bench.node.requests[0].header(b"x-99") == b"v" * 580


@pytest.mark.parametrize("framing", ["length", "chunked", "expected"])
def test_a_body_too_large_is_a_413_that_the_client_can_read_while_it_sends(
    bench: Bench, framing: str
) -> None:
    """The client writes 30 MiB and only then looks: the answer must not be lost by a reset."""
    size = 30 * MIB
    with RawClient(bench.gw.port) as client:
        if framing == "expected":
            head = CHAT_HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % size
            client.send(head)  # a final answer instead of 100
        else:
            length = b"content-length: %d" % size
            framed = length if framing == "length" else b"transfer-encoding: chunked"
            client.send(CHAT_HEAD + framed + b"\r\n\r\n")
            piece = b"x" * MIB if framing == "length" else chunk(b"x" * MIB)
            for _ in range(30):
                client.send(piece)
        client.read_all()
        assert (client.status, client.json()["error"]["code"]) == (413, "request_too_large")
        assert client.headers[b"connection"] == b"close"
    assert bench.node.requests == []


def test_a_body_at_the_limit_passes(bench: Bench) -> None:
    body = b'{"model":"m","x":"' + b"x" * (MIB - 20) + b'"}'
    assert len(body) == MIB
    assert ask(bench.gw.port, post("/v1/chat/completions", body)).status == 200
    assert bench.node.requests[0].body == body


# Patience


@pytest.mark.parametrize(
    ("first", "then"),
    [(b"POST /", b"a"), (b"POST / HTTP/1.1\r\nhost: g", b"g"), (CHAT_HEAD, b"x-a: b\r\n")],
    ids=["in the target", "in a header", "between headers"],
)
def test_a_head_that_does_not_end_is_a_408_and_closed_however_it_trickles(
    bench: Bench, first: bytes, then: bytes
) -> None:
    with RawClient(bench.gw.port) as client:
        begun = monotonic()
        client.send(first)
        told = threading.Event()

        def trickle() -> None:
            with contextlib.suppress(OSError):
                while not told.wait(0.05):
                    client.send(then)

        thread = threading.Thread(target=trickle)
        thread.start()
        client.read_head()
        told.set()
        thread.join()
        assert_told(client, 408, "request_timeout")
        assert monotonic() - begun >= HEAD_S - 0.1


def test_a_body_that_falls_silent_is_a_408_and_takes_no_lease(bench: Bench) -> None:
    with RawClient(bench.gw.port) as client:
        client.send(CHAT_HEAD + b"content-length: 27\r\n\r\n" + BODY[:-1])
        assert state.unloaded(bench.valkey)
        begun = monotonic()
        assert_told(client, 408, "request_timeout")
        assert monotonic() - begun >= BODY_S - 0.1
    assert bench.node.requests == []


def test_a_slow_body_that_never_falls_silent_is_taken(bench: Bench) -> None:
    gap_s = BODY_S / 6
    with RawClient(bench.gw.port) as client:
        client.send(CHAT_HEAD + b"transfer-encoding: chunked\r\n\r\n")
        wait = threading.Event()
        for i in range(0, len(BODY), 3):
            client.send(chunk(BODY[i : i + 3]))
            wait.wait(gap_s)
        client.send(b"0\r\n\r\n").read_all()
        assert (client.status, client.json()) == (200, COMPLETION)


@pytest.mark.parametrize("after", ["nothing", "an answer", "an empty line"])
def test_an_idle_connection_is_closed_after_its_time_without_a_word(
    bench: Bench, after: str
) -> None:
    begun = monotonic()
    with RawClient(bench.gw.port) as client:
        if after != "nothing":
            client.send(chat(stream=False)).read_all()
            assert client.headers.get(b"connection") != b"close"
        if after == "an empty line":
            client.send(b"\r\n")
        assert client._socket.recv(100) == b""
        assert monotonic() - begun >= IDLE_S - 0.1


def test_a_long_answer_is_not_cut_by_any_of_these_times(bench: Bench) -> None:
    bench.node.script = stream_forever(0.1, for_s=IDLE_S + 1.5)
    client = ask(bench.gw.port, chat())
    assert client.complete
    assert client.body.endswith(b"data: [DONE]\n\n")


# HTTP/1.0


def _until_closed(port: int, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 10) as sock:
        sock.sendall(sent)
        parts = []
        while data := sock.recv(65_536):
            parts.append(data)
        return b"".join(parts)


def _in_1_0(request: bytes) -> bytes:
    return request.replace(b"HTTP/1.1", b"HTTP/1.0", 1).replace(b"host: gateway\r\n", b"", 1)


@pytest.mark.parametrize("chunked", [True, False], ids=["node in chunks", "node closes"])
def test_an_http_1_0_client_gets_a_stream_without_chunks_ended_by_the_close(
    bench: Bench, chunked: bool
) -> None:
    bench.node.script = sse_answer(events(5), 0.02, chunked=chunked)
    head, _, body = _until_closed(bench.gw.port, _in_1_0(chat())).partition(b"\r\n\r\n")
    assert body == b"".join(events(5))
    assert b"connection: close" in head
    assert b"transfer-encoding" not in head.lower()
    assert b"text/event-stream" in head


def test_an_http_1_0_client_gets_the_first_event_before_the_second(bench: Bench) -> None:
    bench.node.script = stream_forever(0.05, for_s=20)
    with socket.create_connection(("127.0.0.1", bench.gw.port), 10) as sock:
        sock.sendall(_in_1_0(chat()))
        got = b""
        while got.count(b"\n\n") < 3:
            got += sock.recv(65_536)


@pytest.mark.parametrize("sized", [True, False], ids=["with a length", "without"])
def test_an_http_1_0_client_gets_json_and_the_end_of_the_connection(
    bench: Bench, sized: bool
) -> None:
    if not sized:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n"
        bench.node.script = raw_answer(head + chunk(b"{}") + b"0\r\n\r\n")
    head, _, body = _until_closed(
        bench.gw.port, _in_1_0(chat(stream=False)) + chat(stream=False)
    ).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert body.startswith(b"{")
    assert body.endswith(b"}")
    assert (b"content-length" in head) == sized
    assert len(bench.node.requests) == 1


def test_a_cut_answer_looks_cut_to_an_http_1_0_client_too(bench: Bench) -> None:
    """Where only the close ends an answer, a proper close would say that it is whole."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\ntransfer-encoding: chunked\r\n\r\n"

    async def script(request: Request, peer: Peer) -> None:
        await peer.write(head + chunk(b"half of it"))
        await peer.sleep(0.05)
        peer.reset()

    bench.node.script = script
    with pytest.raises(ConnectionResetError):
        _until_closed(bench.gw.port, _in_1_0(chat(stream=False)))


# Expect


def test_a_body_is_asked_for_only_when_it_will_be_read(started: Bench) -> None:
    """100 comes for a good request; for one that is refused by its head, the refusal alone."""
    expects = b"expect: 100-continue\r\ncontent-length: 27\r\n\r\n"
    with RawClient(started.gw.port) as client:
        client.send(CHAT_HEAD + expects)
        assert client._socket.recv(100).startswith(b"HTTP/1.1 100 ")
        client.send(BODY).read_all()
        assert client.status == 200
    with RawClient(started.gw.port) as client:
        head = CHAT_HEAD.replace(b"POST", b"PUT") + expects
        client.send(head).read_all()
        assert client.status == 405
        assert client.headers[b"connection"] == b"close"
        assert client._socket.recv(1) == b""


def test_an_error_before_a_small_body_has_come_leaves_the_connection_usable(
    bench: Bench,
) -> None:
    """Clients that write head and body apart keep their connection over a 401 or 404."""
    with RawClient(bench.gw.port) as client:
        client.send(CHAT_HEAD.replace(b"POST", b"PUT") + b"content-length: 27\r\n\r\n")
        client.read_all()
        assert client.status == 405
        assert b"connection" not in client.headers
        client._body, client.complete, client._headed = bytearray(), False, False
        client.send(BODY + chat(stream=False)).read_all()
        assert (client.status, client.json()) == (200, COMPLETION)


# Memory


def _rss(gw: Gateway) -> int:
    lines = Path(f"/proc/{gw.pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) * 1024


@contextlib.contextmanager
def _peak(gw: Gateway) -> Iterator[Callable[[], int]]:
    """By how much the resident memory grew at most while the block ran, in bytes."""
    before, most, done = _rss(gw), [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.005):
            most[0] = max(most[0], _rss(gw))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield lambda: most[0] - before
    finally:
        done.set()
        thread.join(5)


def test_twenty_bodies_of_ten_mib_at_once_cost_at_most_three_times_their_size() -> None:
    body = b'{"model":"public","messages":[{"content":"' + b"QUJD" * (10 * MIB // 4) + b'"}]}'
    arrived = threading.Event()

    async def script(request: Request, peer: Peer) -> None:
        while not arrived.is_set():
            await peer.sleep(0.01)
        await json_answer()(request, peer)

    with RawNode(script) as node, ValkeyServer() as server:
        settings = {**small_settings([node], capacity=64), "aliases": {"public": "m"}}
        settings["timeouts"] = {"first_token_s": 60, "connect_s": 10}
        with Gateway(settings, server.url) as gw:
            assert _rss(gw) < 120 * MIB
            with _peak(gw) as grown, contextlib.ExitStack() as stack:
                clients = [stack.enter_context(RawClient(gw.port, timeout_s=60)) for _ in range(20)]
                senders = [
                    threading.Thread(target=c.send, args=(post("/v1/completions", body),))
                    for c in clients
                ]
                for sender in senders:
                    sender.start()
                wait_until(lambda: node.open == 20, within_s=60, what="all have reached the node")
                arrived.set()
                for sender, client in zip(senders, clients, strict=True):
                    sender.join(20)
                    client.read_all()
                    assert client.status == 200
                assert grown() <= 3 * 20 * len(body), f"{grown() / MIB:.0f} MiB"
    assert {request.body for request in node.requests} == {body.replace(b"public", b"m")}


def test_slow_senders_cost_no_more_than_they_have_sent(bench: Bench) -> None:
    """A length is a claim, not a size: what is not there takes no memory."""
    with contextlib.ExitStack() as stack, _peak(bench.gw) as grown:
        for _ in range(100):
            client = stack.enter_context(RawClient(bench.gw.port))
            client.send(CHAT_HEAD + b"content-length: %d\r\n\r\n{" % MIB)
        assert ask(bench.gw.port, chat(stream=False)).status == 200
        assert grown() < 20 * MIB
