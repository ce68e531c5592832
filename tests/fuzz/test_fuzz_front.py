"""The HTTP front under arbitrary bytes on a socket of a real replica.

Whatever comes: the replica lives, says nothing but HTTP, holds no lease afterwards, logs no
fault, and lets nothing reach a node that is not a proper request.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httptools
import pytest
from hypothesis import strategies as st

from tests.cases.bench import Bench, renewed, running_bench
from tests.fuzz.box import fuzz
from tests.support import state
from tests.support.rawclient import ask
from tests.support.rawnode import RESET_ON_CLOSE, chunk, events, json_answer, sse_answer
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.rawnode import Peer, Request

PATH = b"/v1/chat/completions"
CANARY = b'{"model":"m","messages":[],"user":"smuggled"}'
# A whole request that a reader who sees another end of the body would take for the next one.
SMUGGLED = (
    b"POST %b HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    % (PATH, len(CANARY), CANARY)
)


async def _answers(request: Request, peer: Peer) -> None:
    stream = b'"stream":true' in request.body
    await (sse_answer(events(2)) if stream else json_answer())(request, peer)


@pytest.fixture(scope="module")
def started() -> Iterator[Bench]:
    with running_bench(capacity=1000, server={"body_limit_mib": 1, "keep_alive_s": 5}) as bench:
        yield bench


@pytest.fixture
def bench(started: Bench) -> Iterator[Bench]:
    renewed(started).node.script = _answers
    yield started
    # Whatever was done to it: it lives, and has let go of everything.
    assert started.gw.process is not None
    assert started.gw.process.poll() is None
    assert ask(started.gw.port, b"GET /healthz HTTP/1.1\r\nhost: g\r\n\r\n").status == 200
    wait_until(lambda: state.unloaded(started.valkey), within_s=5, what="no lease is left")


class Answers:
    """What came back, as an HTTP client reads it: final answers in order."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""
        self.statuses: list[int] = []
        self.bodies: list[bytes] = []
        self.raw = b""

    def feed(self, data: bytes) -> None:
        """Raises what is no HTTP."""
        self.raw += data
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body = b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self.statuses.append(status)
            self.bodies.append(self._body)


def said(
    bench: Bench, pieces: list[bytes], *, want: int, wait_s: float = 5
) -> tuple[Answers, bool]:
    """Send ``pieces``; read until ``want`` answers are here or the other side closes.

    The answers, and whether it has closed.
    """
    answers = Answers()
    with socket.create_connection(("127.0.0.1", bench.gw.port), 5) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for piece in pieces:
                sock.sendall(piece)
            sock.settimeout(wait_s)
            while len(answers.statuses) < want:
                data = sock.recv(262_144)
                if not data:
                    return answers, True
                answers.feed(data)
        except TimeoutError:
            return answers, False
        except (BrokenPipeError, ConnectionResetError):
            return answers, True
    return answers, False


# What is proper


@dataclass(frozen=True)
class Proper:
    """A proper request, and the body with which it must reach the node; None: it must not."""

    raw: bytes
    status: int
    reaches: bytes | None = None


TOKENS = st.sampled_from([b"x-a", b"X-Long-Name", b"accept", b"user-agent", b"x!#$%&'*+-.^_`|~9"])
VALUES = st.sampled_from([b"", b"1", b"a b\tc", b"\xc3\xa9", b'"q"', b"a: b", b",", b"x" * 500])
SPACE = st.sampled_from([b"", b" ", b"\t", b"  "])


@st.composite
def header_lines(draw: st.DrawFn, *must: bytes) -> bytes:
    more = draw(st.lists(st.tuples(TOKENS, SPACE, VALUES, SPACE), max_size=4))
    lines = [name + b":" + before + value + after for name, before, value, after in more]
    return b"".join(line + b"\r\n" for line in draw(st.permutations([*must, *lines])))


@st.composite
def chunked(draw: st.DrawFn, body: bytes) -> bytes:
    """``body`` in chunks of any size, with what RFC 9112 allows around them."""
    at = sorted(draw(st.sets(st.integers(1, max(1, len(body) - 1)), max_size=5)))
    parts = [body[a:b] for a, b in zip([0, *at], [*at, len(body)], strict=True)]
    extension = draw(st.sampled_from([b"", b";a", b";a=b", b';a="b c"']))
    zeros = draw(st.sampled_from([b"", b"0", b"000"]))
    raw = b"".join(
        zeros + b"%x" % len(part) + extension + b"\r\n" + part + b"\r\n" for part in parts if part
    )
    trailer = draw(st.sampled_from([b"", b"x-checksum: 1\r\n", b"x-a: 1\r\nhost: other\r\n"]))
    return raw + b"0" + extension + b"\r\n" + trailer + b"\r\n"


@st.composite
def chats(draw: st.DrawFn) -> Proper:
    user = draw(st.text(max_size=20))
    fields: dict[str, Any] = {"model": "m", "messages": [], "user": user}
    if draw(st.booleans()):
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps(fields, ensure_ascii=draw(st.booleans()), separators=(",", ":")).encode()
    target = PATH + draw(st.sampled_from([b"", b"?", b"?a=%2F%20b", b"?api-version=1&x=\x7e"]))
    must = [b"Host: gw.example", b"content-type: application/json"]
    in_chunks = draw(st.booleans())
    must.append(b"transfer-encoding: chunked" if in_chunks else b"Content-Length: %d" % len(body))
    lines = draw(header_lines(*must))
    payload = draw(chunked(body)) if in_chunks else body
    before = draw(st.sampled_from([b"", b"", b"\r\n"]))
    return Proper(before + b"POST %b HTTP/1.1\r\n%b\r\n%b" % (target, lines, payload), 200, body)


@st.composite
def others(draw: st.DrawFn) -> Proper:
    """Proper requests that no node hears of."""
    method, target, status = draw(
        st.sampled_from(
            [(b"GET", b"/healthz", 200), (b"GET", b"/v1/models", 200), (b"GET", b"/nothing", 404),
             (b"GET", PATH, 405), (b"PUT", PATH, 405), (b"DELETE", b"/v1/models", 405)]
        )
    )  # fmt: skip
    lines = draw(header_lines(b"host: g"))
    return Proper(b"%b %b HTTP/1.1\r\n%b\r\n" % (method, target, lines), status)


@st.composite
def cut(draw: st.DrawFn, raws: st.SearchStrategy[bytes]) -> list[bytes]:
    raw = draw(raws)
    at = sorted(draw(st.lists(st.integers(0, len(raw)), max_size=4)))
    return [raw[a:b] for a, b in zip([0, *at], [*at, len(raw)], strict=True)]


def test_proper_requests_are_answered_in_order_and_reach_the_node_as_they_are(
    bench: Bench,
) -> None:
    @st.composite
    def cases(draw: st.DrawFn) -> tuple[list[Proper], list[bytes]]:
        requests = draw(st.lists(st.one_of(chats(), others()), min_size=1, max_size=4))
        raw = b"".join(request.raw for request in requests)
        return requests, draw(cut(st.just(raw)))

    def check(case: tuple[list[Proper], list[bytes]]) -> None:
        requests, pieces = case
        bench.node.requests.clear()
        answers, _ = said(bench, pieces, want=len(requests))
        assert answers.statuses == [request.status for request in requests]
        reached = [request.body for request in bench.node.requests]
        assert reached == [r.reaches for r in requests if r.reaches is not None]

    fuzz(check, cases(), share=1 / 3, batch=20)


# What is not


def _post(*lines: bytes, body: bytes = CANARY, first: bytes = b"") -> bytes:
    first = first or b"POST %b HTTP/1.1" % PATH
    return b"\r\n".join([first, b"content-type: application/json", *lines, b"", body])


SIZE = len(CANARY)
HOST, LENGTH, CHUNKED = b"host: g", b"content-length: %d" % SIZE, b"transfer-encoding: chunked"
IN_CHUNKS = chunk(CANARY) + b"0\r\n\r\n"
IMPROPER: dict[str, bytes] = {
    "two lengths": _post(HOST, LENGTH, b"content-length: 0"),
    "two lengths in one": _post(HOST, b"content-length: %d, 0" % SIZE),
    "length with a sign": _post(HOST, b"content-length: +%d" % SIZE),
    "negative length": _post(HOST, b"content-length: -%d" % SIZE),
    "length in hex": _post(HOST, b"content-length: 0x%x" % SIZE),
    "length in words": _post(HOST, b"content-length: many"),
    "length with a space in it": _post(HOST, b"content-length: 4 5"),
    "no length at all in it": _post(HOST, b"content-length:"),
    "length beyond any number": _post(HOST, b"content-length: 1%b" % (b"0" * 30)),
    "length and chunks": _post(HOST, LENGTH, CHUNKED, body=IN_CHUNKS),
    "chunks and length": _post(HOST, CHUNKED, LENGTH, body=IN_CHUNKS),
    "a coding nobody knows": _post(HOST, b"transfer-encoding: xchunked", body=IN_CHUNKS),
    "chunked is not the last coding": _post(
        HOST, b"transfer-encoding: chunked, identity", body=IN_CHUNKS
    ),
    "chunked, then gzip": _post(
        HOST, CHUNKED, b"transfer-encoding: gzip", body=IN_CHUNKS
    ),
    "chunked twice": _post(HOST, CHUNKED, CHUNKED, body=IN_CHUNKS),
    "chunked in quotes": _post(HOST, b'transfer-encoding: "chunked"', body=IN_CHUNKS),
    "chunks of HTTP/1.0": _post(
        HOST, CHUNKED, body=IN_CHUNKS, first=b"POST %b HTTP/1.0" % PATH
    ),
    "a folded header": _post(HOST, b"x-a: 1\r\n  folded", LENGTH),
    "a folded length": _post(HOST, b"content-length:\r\n %d" % SIZE),
    "a space before the colon": _post(HOST, b"content-length : %d" % SIZE),
    "a tab before the colon": _post(HOST, b"transfer-encoding\t: chunked", body=IN_CHUNKS),
    "a line without a colon": _post(HOST, b"nonsense", LENGTH),
    "a header without a name": _post(HOST, b": x", LENGTH),
    "a space in a name": _post(HOST, b"content length: 3", LENGTH),
    "a NUL in a value": _post(HOST, b"x-a: 1\x002", LENGTH),
    "a NUL in a name": _post(HOST, b"x\x00a: 1", LENGTH),
    "a control in a value": _post(HOST, b"x-a: 1\x012", LENGTH),
    "a lone CR in a value": _post(HOST, b"x-a: 1\rcontent-length: 3", LENGTH),
    "a letter beyond ASCII in a name": _post(HOST, b"x-\xc3\xa9: 1", LENGTH),
    "lone LF at the ends of lines": _post(HOST, LENGTH).replace(b"\r\n", b"\n"),
    "a lone LF at the end of the head": _post(HOST, LENGTH).replace(b"\r\n\r\n", b"\n\n"),
    "a lone CR at the end of the head": _post(HOST, LENGTH).replace(b"\r\n\r\n", b"\r\r"),
    "a head that begins with a space": _post(b" x: 1", HOST, LENGTH),
    "no host": _post(LENGTH),
    "two hosts": _post(HOST, b"host: other", LENGTH),
    "no version": _post(HOST, LENGTH, first=b"POST %b" % PATH),
    "a version nobody speaks": _post(HOST, LENGTH, first=b"POST %b HTTP/3.7" % PATH),
    "another protocol": _post(HOST, LENGTH, first=b"POST %b SMTP/1.1" % PATH),
    "two spaces": _post(HOST, LENGTH, first=b"POST %b  HTTP/1.1 x" % PATH),
    "a method that is none": _post(HOST, LENGTH, first=b"PO(ST %b HTTP/1.1" % PATH),
    "a method in small letters": _post(HOST, LENGTH, first=b"post %b HTTP/1.1" % PATH),
    "a target without a slash": _post(HOST, LENGTH, first=b"POST v1 HTTP/1.1"),
    "a control in the target": _post(HOST, LENGTH, first=b"POST %b\x01 HTTP/1.1" % PATH),
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SMUGGLED,
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + SMUGGLED,
    "a size that is none": _post(HOST, CHUNKED, body=b"zz\r\n" + CANARY + b"\r\n0\r\n\r\n"),
    "a size with a sign": _post(HOST, CHUNKED, body=b"+" + IN_CHUNKS),
    "a negative size": _post(HOST, CHUNKED, body=b"-" + IN_CHUNKS),
    "a size with 0x": _post(HOST, CHUNKED, body=b"0x" + IN_CHUNKS),
    "a size beyond any number": _post(HOST, CHUNKED, body=b"f" * 17 + b"\r\n" + CANARY),
    "an empty size": _post(HOST, CHUNKED, body=b"\r\n" + CANARY + b"\r\n0\r\n\r\n"),
    "a chunk that is longer": _post(
        HOST, CHUNKED, body=b"3\r\n" + CANARY + b"\r\n0\r\n\r\n"
    ),
    "a chunk that ends in LF": _post(
        HOST, CHUNKED, body=b"%x\r\n%b\n0\r\n\r\n" % (SIZE, CANARY)
    ),
    "a size that ends in LF": _post(
        HOST, CHUNKED, body=b"%x\n%b\r\n0\r\n\r\n" % (SIZE, CANARY)
    ),
    "a size that ends in CR": _post(
        HOST, CHUNKED, body=b"%x\r%b\r\n0\r\n\r\n" % (SIZE, CANARY)
    ),
    "a broken trailer": _post(HOST, CHUNKED, body=chunk(CANARY) + b"0\r\nx y\r\n\r\n"),
    "a name of 100 KiB": _post(HOST, b"x" * 100_000 + b": 1", LENGTH),
    "a value of 100 KiB": _post(HOST, b"x-a: " + b"x" * 100_000, LENGTH),
    "a target of 100 KiB": _post(
        HOST, LENGTH, first=b"POST %b?%b HTTP/1.1" % (PATH, b"x" * 100_000)
    ),
    "headers without end": _post(HOST, *(b"x-%d: 1" % i for i in range(5000)), LENGTH),
    "a body above the limit": _post(HOST, b"content-length: 2000000", body=b"x" * 100_000),
}  # fmt: skip


def assert_refused(bench: Bench, raw: bytes, pieces: list[bytes], before: list[Proper]) -> None:
    """Proper requests in front are answered, the improper one is refused, nothing after it."""
    bench.node.requests.clear()
    answers, closed = said(bench, pieces, want=len(before) + 5)
    assert closed, "what follows something improper is not read"
    expected = [request.status for request in before]
    got = answers.statuses
    # A refusal may come before the answers that are due, but nothing else can.
    assert got[: len(expected)] == expected[: len(got)]
    assert len(got) <= len(expected) + 1
    if len(got) > len(expected):
        assert 400 <= got[-1] < 600
        assert got[-1] not in {500, 502, 503, 504}, "it is not the gateway's fault"
        assert set(json.loads(answers.bodies[-1])["error"]) == {"message", "type", "param", "code"}
    reached = [request.body for request in bench.node.requests]
    assert all(body != CANARY for body in reached)
    assert reached == [r.reaches for r in before if r.reaches is not None][: len(reached)]


@pytest.mark.parametrize("name", IMPROPER)
def test_what_is_improper_is_refused_and_nothing_behind_it_is_read(bench: Bench, name: str) -> None:
    raw = IMPROPER[name]
    assert_refused(bench, raw, [raw + SMUGGLED], [])
    half = len(raw) // 2
    assert_refused(bench, raw, [raw[:half], raw[half:], SMUGGLED], [])


def test_what_is_improper_is_refused_wherever_it_stands(bench: Bench) -> None:
    @st.composite
    def cases(draw: st.DrawFn) -> tuple[str, list[Proper], list[bytes]]:
        name = draw(st.sampled_from(sorted(n for n in IMPROPER if len(IMPROPER[n]) < 20_000)))
        before = draw(st.lists(st.one_of(chats(), others()), max_size=2))
        raw = b"".join(request.raw for request in before) + IMPROPER[name] + SMUGGLED
        return name, before, draw(cut(st.just(raw)))

    def check(case: tuple[str, list[Proper], list[bytes]]) -> None:
        name, before, pieces = case
        assert_refused(bench, IMPROPER[name], pieces, before)

    fuzz(check, cases(), share=1 / 3, batch=20)


# Anything


@dataclass
class Noise:
    """Bytes, and how the client leaves."""

    pieces: list[bytes] = field(default_factory=list)
    reset: bool = False


@st.composite
def noise(draw: st.DrawFn) -> Noise:
    """Requests in which bytes were changed, lost, doubled or put in; or none at all."""
    raw = bytearray(
        b"".join(
            draw(
                st.lists(
                    st.one_of(
                        chats().map(lambda request: request.raw),
                        others().map(lambda request: request.raw),
                        st.sampled_from([raw for raw in IMPROPER.values() if len(raw) < 20_000]),
                        st.binary(max_size=60),
                    ),
                    min_size=1,
                    max_size=3,
                )
            )
        )
    )
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(raw)))
        until = at + draw(st.integers(0, 8))
        put = draw(
            st.sampled_from([b"", b"\r\n", b"\n", b"\r", b"\x00", b" ", b":", b"0", b"\xff", b"{"])
            | st.binary(max_size=4)
        )
        raw[at:until] = put
    pieces = draw(cut(st.just(bytes(raw[:20_000]))))
    return Noise(pieces, draw(st.booleans()))


def test_noise_of_any_kind_does_no_harm(bench: Bench) -> None:
    def check(case: Noise) -> None:
        bench.node.requests.clear()
        answers = Answers()
        with socket.create_connection(("127.0.0.1", bench.gw.port), 5) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                for piece in case.pieces:
                    sock.sendall(piece)
                sock.settimeout(0.02)  # most is answered at once; for the rest it would wait long
                while data := sock.recv(262_144):
                    if not any(p.lstrip().startswith(b"HEAD") for p in case.pieces):
                        answers.feed(data)
            except (TimeoutError, BrokenPipeError, ConnectionResetError):
                pass
            if case.reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        assert not answers.raw or answers.raw.startswith(b"HTTP/1.")
        assert not {500, 502, 503, 504} & set(answers.statuses)
        for request in bench.node.requests:  # what is in it may be changed, but it is a request
            assert request.target.startswith(PATH.decode())
            assert request.json()["model"] == "m"

    fuzz(check, noise(), share=1 / 3, batch=20)
