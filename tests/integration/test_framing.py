"""HTTP/1.1 framing on both sides: what two readers could read differently is refused.

Each attempt is a test by its name. The node must never see a request that was not meant, and
the client never an answer that was not its own.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import redis

from tests.cases.conftest import small_settings
from tests.support import state
from tests.support.rawclient import RawClient, ask
from tests.support.rawnode import COMPLETION, RawNode, chunk, hang, json_answer, raw_answer, sized
from tests.support.servers import Gateway, ValkeyServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.rawnode import Peer, Request

BODY = b'{"model":"m","messages":[]}'
SMUGGLED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nx-smuggled: 1\r\n"


def head(*lines: bytes, first: bytes = b"POST /v1/chat/completions HTTP/1.1") -> bytes:
    """A request head with ``Host`` and the JSON type, and these lines."""
    given = (first, b"Host: g", b"Content-Type: application/json", *lines)
    return b"\r\n".join(given) + b"\r\n\r\n"


LENGTH = b"Content-Length: %d" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked"
CHUNKS = chunk(BODY) + b"0\r\n\r\n"
GOOD = head(LENGTH) + BODY


@dataclass(frozen=True)
class Bench:
    """One replica over one node; ``valkey`` reads their Redis."""

    gw: Gateway
    node: RawNode
    valkey: redis.Redis


@pytest.fixture(scope="module")
def started() -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ValkeyServer())
        valkey = stack.enter_context(redis.Redis(port=server.port, decode_responses=True))
        node = stack.enter_context(RawNode())
        settings = small_settings([node], circuit={"failure_threshold": 1000, "failure_rate": 1.0})
        gw = stack.enter_context(Gateway(settings, server.url))
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


def assert_refused(port: int, sent: bytes, status: int = 400) -> None:
    """The one answer is an error of the gateway in the OpenAI shape, then the connection ends."""
    with RawClient(port) as client:
        client.send(sent).read_all()
        assert client.complete
        assert client.status == status
        assert client.headers[b"content-type"] == b"application/json"
        assert client.headers[b"connection"] == b"close"
        error = client.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert client._socket.recv(1) == b""


# Requests that are refused

REFUSED: dict[str, bytes] = {
    "two lengths that agree": head(LENGTH, LENGTH) + BODY,
    "two lengths that differ": head(LENGTH, b"Content-Length: 5") + BODY,
    "a list of lengths": head(b"Content-Length: 27, 27") + BODY,
    "a length with a sign": head(b"Content-Length: +27") + BODY,
    "a negative length": head(b"Content-Length: -1") + BODY,
    "a hexadecimal length": head(b"Content-Length: 0x1b") + BODY,
    "a length of two words": head(b"Content-Length: 2 7") + BODY,
    "an empty length": head(b"Content-Length:") + BODY,
    "a length beyond 64 bits": head(b"Content-Length: 99999999999999999999999") + BODY,
    "length, then chunked": head(LENGTH, CHUNKED) + CHUNKS,
    "chunked, then length": head(CHUNKED, LENGTH) + CHUNKS,
    "length 0 and chunked": head(b"Content-Length: 0", CHUNKED) + CHUNKS,
    "chunked twice": head(CHUNKED, CHUNKED) + CHUNKS,
    "chunked twice in a list": head(b"Transfer-Encoding: chunked, chunked") + CHUNKS,
    "a coding before chunked": head(b"Transfer-Encoding: gzip, chunked") + CHUNKS,
    "a coding after chunked": head(b"Transfer-Encoding: chunked, gzip") + CHUNKS,
    "another coding": head(b"Transfer-Encoding: gzip") + CHUNKS,
    "identity": head(b"Transfer-Encoding: identity") + BODY,
    "a coding that looks like chunked": head(b"Transfer-Encoding: xchunked") + CHUNKS,
    "chunked with a parameter": head(b"Transfer-Encoding: chunked;q=1") + CHUNKS,
    "chunked in quotes": head(b'Transfer-Encoding: "chunked"') + CHUNKS,
    "chunked behind a vertical tab": head(b"Transfer-Encoding: \x0bchunked") + CHUNKS,
    "chunked after a line fold": head(b"Transfer-Encoding:\r\n chunked") + CHUNKS,
    "an empty coding": head(b"Transfer-Encoding:") + CHUNKS,
    "chunked in HTTP/1.0": head(CHUNKED, first=b"POST /v1/chat/completions HTTP/1.0") + CHUNKS,
    "a bare LF behind a header": head(b"X-A: b\nContent-Length: 27") + BODY,
    "a bare LF ends the head": head(LENGTH)[:-2] + b"\n" + BODY,
    "bare LF everywhere": head(LENGTH).replace(b"\r\n", b"\n") + BODY,
    "a bare CR in a value": head(b"X-A: b\rX-B: c", LENGTH) + BODY,
    "two CR before LF": head(b"X-A: b\r", LENGTH) + BODY,
    "a folded header": head(b"X-A: b\r\n c", LENGTH) + BODY,
    "a folded length": head(b"Content-Length:\r\n\t27") + BODY,
    "a space before the colon": head(b"Content-Length : 27") + BODY,
    "a tab before the colon": head(b"Transfer-Encoding\t: chunked") + CHUNKS,
    "a space before the first header": b"POST / HTTP/1.1\r\n Host: g\r\n\r\n",
    "a header without a colon": head(b"garbage", LENGTH) + BODY,
    "a header without a name": head(b": x", LENGTH) + BODY,
    "NUL in a value": head(b"X-A: b\0c", LENGTH) + BODY,
    "a control character in a value": head(b"X-A: b\x01c", LENGTH) + BODY,
    "DEL in a value": head(b"X-A: b\x7fc", LENGTH) + BODY,
    "NUL in a name": head(b"X\0A: b", LENGTH) + BODY,
    "a byte above 127 in a name": head(b"X-\xe9: b", LENGTH) + BODY,
    "a space in a name": head(b"X A: b", LENGTH) + BODY,
    "no Host": b"POST /v1/chat/completions HTTP/1.1\r\n" + LENGTH + b"\r\n\r\n" + BODY,
    "two Hosts": head(b"Host: h", LENGTH) + BODY,
    "a space in the target": head(LENGTH, first=b"POST /v1/chat completions HTTP/1.1") + BODY,
    "a control character in the target": head(LENGTH, first=b"POST /v1/\x01 HTTP/1.1") + BODY,
    "a byte above 127 in the target": head(LENGTH, first=b"POST /v1/\xe9 HTTP/1.1") + BODY,
    "a fragment in the target": head(LENGTH, first=b"POST /v1/chat/completions#x HTTP/1.1") + BODY,
    "a tunnel": head(first=b"CONNECT h:443 HTTP/1.1"),
    "a method in lower case": head(LENGTH, first=b"post /v1/chat/completions HTTP/1.1") + BODY,
    "an unknown method": head(LENGTH, first=b"SMUGGLE /v1/chat/completions HTTP/1.1") + BODY,
    "an unknown version": head(LENGTH, first=b"POST /v1/chat/completions HTTP/1.2") + BODY,
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a TLS handshake": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x9f" * 64,
    "a chunk size with a sign": head(CHUNKED) + b"+1b\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk size with 0x": head(CHUNKED) + b"0x1b\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a space behind a chunk size": head(CHUNKED) + b"1b \r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk size beyond 64 bits": head(CHUNKED) + b"f" * 17 + b"\r\n" + BODY,
    "a bare LF behind a chunk size": head(CHUNKED) + b"1b\n" + BODY + b"\r\n0\r\n\r\n",
    "a bare LF behind a chunk": head(CHUNKED) + b"1b\r\n" + BODY + b"\n0\r\n\r\n",
    "a bare LF in a chunk extension": head(CHUNKED) + b"1b;a\nb\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk longer than it says": head(CHUNKED) + b"1a\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a length among the trailers": head(CHUNKED) + chunk(BODY) + b"0\r\n" + LENGTH + b"\r\n\r\n",
    "chunks that carry next to nothing": head(CHUNKED) + b"1;" + b"x" * 200_000,
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_a_node_hears_of_it(bench: Bench, name: str) -> None:
    sent = REFUSED[name] + SMUGGLED + LENGTH + b"\r\n\r\n" + BODY
    assert_refused(bench.gw.port, sent)
    assert bench.node.requests == []
    assert state.unloaded(bench.valkey)
    # And the next client is served.
    assert ask(bench.gw.port, GOOD).status == 200


@pytest.mark.parametrize("name", ["HTTP/0.9", "HTTP/2.0"])
def test_another_version_of_http_is_told_which_one_is_spoken(bench: Bench, name: str) -> None:
    first = b"POST /v1/chat/completions " + name.encode()
    assert_refused(bench.gw.port, head(LENGTH, first=first) + BODY, 505)
    assert bench.node.requests == []


@pytest.mark.parametrize("name", REFUSED)
def test_refused_byte_by_byte_as_well(bench: Bench, name: str) -> None:
    """What is refused does not depend on how the bytes are cut into reads."""
    sent = REFUSED[name][:600]
    with RawClient(bench.gw.port) as client:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for i in range(len(sent)):
                client.send(sent[i : i + 1])
            client.send(SMUGGLED + LENGTH + b"\r\n\r\n" + BODY + b"x" * 200_000)
        client.read_all()
        assert client.status == 400
    assert bench.node.requests == []


# Requests that are taken, however they come

TAKEN: dict[str, bytes] = {
    "chunked": head(CHUNKED) + CHUNKS,
    "chunked in capitals": head(b"TRANSFER-ENCODING: CHUNKED") + CHUNKS,
    "a chunk for each byte": head(CHUNKED)
    + b"".join(chunk(BODY[i : i + 1]) for i in range(len(BODY)))
    + b"0\r\n\r\n",
    "chunk extensions": head(CHUNKED) + b'1b;a="b"\r\n' + BODY + b"\r\n0;x\r\n\r\n",
    "trailers": head(CHUNKED, b"Trailer: x-late") + CHUNKS[:-2] + b"x-late: 1\r\nx-b: 2\r\n\r\n",
    "an absolute target": head(LENGTH, first=b"POST http://h/v1/chat/completions HTTP/1.1") + BODY,
    "an escaped path": head(LENGTH, first=b"POST /v1/%63hat/completions HTTP/1.1") + BODY,
    "empty lines before it": b"\r\n\r\n" + GOOD,
    "a length with zeros": head(b"Content-Length: 00027") + BODY,
    "spaces around a value": head(b"X-A:  b \t", b"Content-Length:27 ") + BODY,
    "obs-text in a value": head(b"X-A: caf\xe9", LENGTH) + BODY,
    "an offer to upgrade": head(b"Connection: Upgrade", b"Upgrade: h2c", LENGTH) + BODY,
    "an offer to upgrade, in capitals": head(
        b"CONNECTION: UPGRADE", b"UPGRADE: websocket", LENGTH
    ) + BODY,
    "an offer to upgrade a chunked request": head(
        b"Upgrade: h2c", b"Connection: Upgrade", CHUNKED
    ) + CHUNKS,
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("cut", ["whole", "in bytes"])
def test_taken_whole_or_byte_by_byte(bench: Bench, name: str, cut: str) -> None:
    sent = TAKEN[name]
    with RawClient(bench.gw.port) as client:
        step = len(sent) if cut == "whole" else 1
        for i in range(0, len(sent), step):
            client.send(sent[i : i + step])
        client.read_all()
        assert (client.status, client.json()) == (200, COMPLETION)
    (seen,) = bench.node.requests
    assert (seen.target, seen.body) == ("/v1/chat/completions", BODY)
    names = [name.lower() for name, _ in seen.headers]
    assert names.count(b"content-length") == 1
    assert not {b"transfer-encoding", b"upgrade", b"trailer", b"x-late", b"x-b"} & set(names)


def test_an_upgrade_header_cut_between_two_reads_is_not_taken(bench: Bench) -> None:
    sent = TAKEN["an offer to upgrade"]
    offer = sent.index(b"Upgrade: h2c")
    for i in range(offer, offer + len(b"Upgrade: h2c\r\n") + 1):
        with RawClient(bench.gw.port) as client:
            client.send(sent[:i])
            time.sleep(0.01)  # long enough, as a rule, for a read of its own
            client.send(sent[i:]).read_all()
            assert client.status == 200, sent[:i]
    assert {request.body for request in bench.node.requests} == {BODY}


def test_a_trailer_is_no_header_of_the_request(bench: Bench) -> None:
    late = b"x-request-id: smuggled\r\nauthorization: Bearer k\r\nconnection: close\r\n\r\n"
    client = ask(bench.gw.port, head(CHUNKED) + CHUNKS[:-2] + late)
    assert client.status == 200
    (seen,) = bench.node.requests
    assert seen.header(b"x-request-id") == client.headers[b"x-request-id"] != b"smuggled"
    assert seen.header(b"authorization") is None


# Pipelining


@dataclass(frozen=True)
class Answered:
    status: int
    headers: dict[bytes, bytes]
    body: bytes


class Pipelining(RawClient):
    """A client that sends ahead: ``answers`` are those that have come, in order."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.answers: list[Answered] = []

    def on_message_begin(self) -> None:
        self.headers, self._body = {}, bytearray()

    def on_message_complete(self) -> None:
        self.answers.append(Answered(self._parser.get_status_code(), self.headers, self.body))

    def read(self, n: int) -> list[Answered]:
        """Wait for ``n`` answers."""
        while len(self.answers) < n and not self.cut:
            self._read()
        assert len(self.answers) == n
        return self.answers


def test_the_second_request_of_a_packet_begins_when_the_first_is_answered(bench: Bench) -> None:
    at_once: list[int] = []

    async def script(request: Request, peer: Peer) -> None:
        at_once.append(bench.node.open)
        await peer.sleep(0.05)
        answer = sized(200, b"[%s]" % (request.header(b"x-n") or b""), [(b"content-type", b"a/b")])
        await peer.write(answer)

    bench.node.script = script
    sent = b"".join(
        head(b"X-N: %d" % n, *how) + body
        for n, (how, body) in enumerate(
            [((LENGTH,), BODY), ((CHUNKED,), CHUNKS), ((LENGTH,), BODY), ((CHUNKED,), CHUNKS)]
        )
    )
    with Pipelining(bench.gw.port) as client:
        got = client.send(sent).read(4)
    assert [one.body for one in got] == [b"[0]", b"[1]", b"[2]", b"[3]"]
    assert at_once == [1, 1, 1, 1]
    assert [request.body for request in bench.node.requests] == [BODY] * 4


def test_a_hundred_requests_sent_ahead_are_all_answered_in_order(bench: Bench) -> None:
    sent = b"".join(head(b"X-Request-Id: r%d" % n, LENGTH) + BODY for n in range(100))
    with Pipelining(bench.gw.port) as client:
        got = client.send(sent).read(100)
    assert [one.headers[b"x-request-id"] for one in got] == [b"r%d" % n for n in range(100)]
    assert bench.node.max_open == 1


def test_garbage_behind_a_request_is_refused_after_its_answer(bench: Bench) -> None:
    bench.node.script = json_answer(after_s=0.05)
    with Pipelining(bench.gw.port) as client:
        good, bad = client.send(GOOD + b"garbage\r\n\r\n" + GOOD).read(2)
        client._read()
        assert client.cut, "the connection is closed"
    assert (good.status, bad.status) == (200, 400)
    assert json.loads(good.body) == COMPLETION
    assert len(bench.node.requests) == 1


def test_nothing_is_served_behind_a_request_that_closes(bench: Bench) -> None:
    with RawClient(bench.gw.port) as client:
        client.send(head(b"Connection: close", LENGTH) + BODY + GOOD)
        client.read_all()
        client._read()
        assert client.json() == COMPLETION
    assert len(bench.node.requests) == 1


def test_a_client_that_leaves_takes_what_it_sent_ahead_with_it(bench: Bench) -> None:
    bench.node.script = hang()
    with Pipelining(bench.gw.port) as client:
        client.send(GOOD * 3)
        wait_until(lambda: bench.node.open == 1, what="the first is at the node")
    wait_until(lambda: bench.node.open == 0, within_s=2, what="the node is stopped")
    wait_until(lambda: state.unloaded(bench.valkey), within_s=2, what="load = 0")
    assert len(bench.node.requests) == 1


def test_an_upgrade_in_a_request_sent_ahead_is_refused_not_misread(bench: Bench) -> None:
    ahead = TAKEN["an offer to upgrade"]
    with Pipelining(bench.gw.port) as client:
        first, second = client.send(GOOD + ahead).read(2)
    assert (first.status, second.status) == (200, 400)
    assert [request.body for request in bench.node.requests] == [BODY]


# Answers of nodes

ANSWER = json.dumps(COMPLETION).encode()
N = len(ANSWER)
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
OK_LENGTH = OK + b"content-length: %d\r\n" % N

BROKEN: dict[str, bytes] = {
    "length and chunked": OK_LENGTH + b"transfer-encoding: chunked\r\n\r\n" + chunk(ANSWER)
    + b"0\r\n\r\n",
    "two lengths": OK_LENGTH + b"content-length: %d\r\n\r\n" % N + ANSWER,
    "a coding before chunked": OK + b"transfer-encoding: gzip, chunked\r\n\r\n" + chunk(ANSWER)
    + b"0\r\n\r\n",
    "another coding": OK + b"transfer-encoding: gzip\r\n\r\n" + ANSWER,
    "bare LF": (OK_LENGTH + b"\r\n").replace(b"\r\n", b"\n") + ANSWER,
    "a folded header": OK_LENGTH + b"x-a: b\r\n c\r\n\r\n" + ANSWER,
    "a space before the colon": OK + b"content-length : %d\r\n\r\n" % N + ANSWER,
    "NUL in a header": OK_LENGTH + b"x-a: b\0c\r\n\r\n" + ANSWER,
    "HTTP/2.0": (OK_LENGTH + b"\r\n").replace(b"HTTP/1.1", b"HTTP/2.0") + ANSWER,
    "status 099": (OK_LENGTH + b"\r\n").replace(b"200", b"099") + ANSWER,
    "another protocol": b"HTTP/1.1 101 S\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n" + ANSWER,
    "no HTTP at all": b"SSH-2.0-OpenSSH_9.2\r\n",
    "a chunk longer than it says": OK + b"transfer-encoding: chunked\r\n\r\n1\r\n" + ANSWER
    + b"\r\n0\r\n\r\n",
    "half a body": OK_LENGTH + b"\r\n" + ANSWER[:20],
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_malformed_answer_is_the_nodes_failure_and_never_the_clients_answer(
    bench: Bench, name: str
) -> None:
    assert ask(bench.gw.port, GOOD).status == 200
    wait_until(lambda: state.record(bench.valkey, "b1")["streak"] == "0", what="a good record")
    bench.node.requests.clear()
    bench.node.script = raw_answer(BROKEN[name])
    client = ask(bench.gw.port, GOOD)
    assert client.status == 502
    assert client.json()["error"]["type"] == "upstream_error"
    assert len(bench.node.requests) == 1
    wait_until(lambda: state.record(bench.valkey, "b1")["streak"] == "1", what="a failure")
    bench.node.script = json_answer()
    assert ask(bench.gw.port, GOOD).json() == COMPLETION


def test_an_endless_head_of_a_node_is_given_up(bench: Bench) -> None:
    async def script(request: Request, peer: Peer) -> None:
        await peer.write(OK + b"x-a: " + b"b" * 400_000)
        await peer.wait_closed()

    bench.node.script = script
    client = ask(bench.gw.port, GOOD)
    assert (client.status, client.json()["error"]["code"]) == (502, "malformed")


WELL: dict[str, bytes] = {
    "announcements before it": b"HTTP/1.1 100 Continue\r\nx-early: 1\r\n\r\n"
    b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\ncontent-length: 5\r\n\r\n" + OK_LENGTH + b"\r\n"
    + ANSWER,
    "trailers": OK + b"trailer: x-late\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(ANSWER)
    + b"0\r\nx-late: 1\r\nset-cookie: a=b\r\nx-request-id: node\r\n\r\n",
    "no reason phrase": OK_LENGTH.replace(b" OK", b"") + b"\r\n" + ANSWER,
    "HTTP/1.0 with a length": OK_LENGTH.replace(b"1.1", b"1.0") + b"\r\n" + ANSWER,
    "ended by the close": OK + b"connection: close\r\n\r\n" + ANSWER,
    "an offer to upgrade": OK_LENGTH + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n" + ANSWER,
    "headers that Connection names": OK_LENGTH + b"connection: x-early, Keep-Alive\r\n"
    b"x-early: 1\r\n"
    b"\r\n" + ANSWER,
}  # fmt: skip


@pytest.mark.parametrize("name", WELL)
def test_an_odd_but_legal_answer_reaches_the_client_without_what_is_of_the_hop(
    bench: Bench, name: str
) -> None:
    bench.node.script = raw_answer(WELL[name])
    client = ask(bench.gw.port, GOOD)
    assert (client.status, client.body) == (200, ANSWER)
    hop = {b"trailer", b"x-late", b"set-cookie", b"x-early", b"link", b"upgrade", b"connection"}
    assert not hop & client.headers.keys()
    assert client.headers[b"x-request-id"] != b"node"


EXCESS: dict[str, bytes] = {
    "a second answer": OK + b"content-length: 6\r\nx-second: 1\r\n\r\nsecond",
    "garbage": b"garbage",
    "half a second head": OK,
}


@pytest.mark.parametrize("name", EXCESS)
@pytest.mark.parametrize("when", ["in the same read", "later"])
def test_what_a_node_says_without_being_asked_is_nobodys_answer(
    bench: Bench, name: str, when: str
) -> None:
    whole = OK_LENGTH + b"\r\n" + ANSWER

    async def script(request: Request, peer: Peer) -> None:
        if len(bench.node.requests) > 1:
            await json_answer()(request, peer)
            return
        await peer.write(whole + EXCESS[name] if when == "in the same read" else whole)
        if when == "later":
            await peer.sleep(0.05)
            await peer.write(EXCESS[name])

    bench.node.script = script
    with RawClient(bench.gw.port) as client:
        client.send(GOOD)
        assert client.read_all() == ANSWER
        assert b"x-second" not in client.headers
    wait_until(lambda: state.unloaded(bench.valkey), what="load = 0")
    # Well before it would be too old to be kept.
    wait_until(lambda: bench.node.connected == 0, within_s=2, what="that connection is not kept")
    assert ask(bench.gw.port, GOOD).json() == COMPLETION
    assert len({request.connection for request in bench.node.requests}) == 2
