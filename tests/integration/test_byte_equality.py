"""Byte equality: through the gateway and direct to the node, over recorded shapes.

The shapes stand in ``tests/support/corpus``: what clients send and engines answer, as bytes.
Streams in it say whether they want usage, so that nothing is asked or hidden for them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis

from tests.cases.conftest import small_settings
from tests.support import state
from tests.support.rawclient import RawClient
from tests.support.rawnode import RawNode, chunk
from tests.support.servers import Gateway, ValkeyServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.rawnode import Headers, Peer, Request

CORPUS = Path(__file__).parents[1] / "support" / "corpus"
INDEX: dict[str, dict[str, Any]] = json.loads((CORPUS / "index.json").read_text("utf-8"))

# What belongs to a hop, or is the gateway's own word: all other headers are the same on both ways.
_OF_THE_HOP = {b"host", b"content-length", b"connection", b"transfer-encoding", b"keep-alive"}
_TO_NODE = _OF_THE_HOP | {b"accept-encoding", b"x-request-id", b"authorization"}
_TO_CLIENT = _OF_THE_HOP | {b"date", b"x-request-id", b"cache-control", b"x-accel-buffering"}
SENT: Headers = [
    (b"User-Agent", b"OpenAI/Python 1.99.0"),
    (b"Accept", b"application/json"),
    (b"X-Stainless-Lang", b"python"),
    (b"X-Stainless-Raw-Response", b""),
    (b"anthropic-version", b"2023-06-01"),
    (b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    (b"OpenAI-Organization", b"org-1"),
    (b"X-Tag", b"one"),
    (b"X-Tag", b"two"),
]
ANSWERED: Headers = [
    (b"openai-processing-ms", b"171"),
    (b"x-ratelimit-remaining-requests", b"9"),
    (b"link", b"<a>; rel=next"),
    (b"link", b"<b>; rel=prev"),
    (b"x-odd", b'caf\xe9 "quoted", b'),
]
FRAMINGS = ["sized", "one chunk", "chunked by event", "chunked anywhere", "byte by byte", "closed"]


@dataclass(frozen=True)
class Shape:
    """One recorded exchange."""

    path: str
    request: bytes
    request_type: str
    response: bytes
    response_type: str
    status: int

    def sent(self, *, chunked: bool) -> bytes:
        """The request's bytes."""
        framing = b"transfer-encoding: chunked"
        if not chunked:
            framing = b"content-length: %d" % len(self.request)
        lines = [
            f"POST {self.path}?api-version=2&x=%2F HTTP/1.1".encode(),
            b"host: one.example",
            b"content-type: " + self.request_type.encode(),
            *(name + b": " + value for name, value in SENT),
            framing,
        ]
        body = self.request
        if chunked:
            half = len(body) // 2
            body = chunk(body[:half]) + chunk(body[half:]) + b"0\r\n\r\n"
        return b"\r\n".join(lines) + b"\r\n\r\n" + body

    def pieces(self, framing: str) -> list[bytes]:
        """The answer's body in the parts that a node writes."""
        body = self.response
        if framing == "chunked by event":
            return [part for part in re.split(rb"(?<=\n\n)|(?<=\r\n\r\n)", body) if part]
        if framing == "chunked anywhere":
            cuts = sorted(random.Random(1).sample(range(1, len(body)), min(9, len(body) - 1)))
            return [body[a:b] for a, b in itertools.pairwise([0, *cuts, len(body)])]
        if framing == "byte by byte":
            return [body[i : i + 1] for i in range(len(body))]
        return [body]


def shape(name: str) -> Shape:
    one = INDEX[name]
    return Shape(
        one["path"],
        (CORPUS / one["request"]).read_bytes(),
        one["request_type"],
        (CORPUS / one["response"]).read_bytes(),
        one["response_type"],
        one["status"],
    )


class Recorder(RawClient):
    """A client that keeps the answer's headers in order."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.listed: Headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.listed.append((name.lower(), value))


@dataclass(frozen=True)
class Bench:
    gw: Gateway
    node: RawNode
    valkey: redis.Redis


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ValkeyServer())
        valkey = stack.enter_context(redis.Redis(port=server.port, decode_responses=True))
        node = stack.enter_context(RawNode())
        gw = stack.enter_context(Gateway(small_settings([node]), server.url))
        yield Bench(gw, node, valkey)
        assert gw.stop() == 0
        assert "Traceback" not in gw.log, gw.log


@dataclass(frozen=True)
class Seen:
    """One exchange, as both ends have seen it, without what belongs to the hop."""

    target: str
    asked: Headers
    request: bytes
    status: int
    answered: Headers
    response: bytes


def exchange(bench: Bench, port: int, one: Shape, *, chunked: bool, closes: bool = False) -> Seen:
    bench.node.requests.clear()
    with Recorder(port) as client:
        client.send(one.sent(chunked=chunked))
        client.read_all()
        assert client.complete != closes
    (request,) = bench.node.requests
    asked = [(n.lower(), v) for n, v in request.headers if n.lower() not in _TO_NODE]
    answered = [
        (n, v) for n, v in client.listed if n not in _TO_CLIENT and not n.startswith(b"x-leaseway")
    ]
    return Seen(request.target, asked, request.body, client.status, answered, client.body)


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("name", INDEX)
def test_through_the_gateway_and_direct_are_the_same(bench: Bench, name: str, framing: str) -> None:
    one = shape(name)
    headers = [(b"content-type", one.response_type.encode()), *ANSWERED]

    async def script(request: Request, peer: Peer) -> None:
        lines = [b"HTTP/1.1 %d Said" % one.status, *(n + b": " + v for n, v in headers)]
        if framing == "sized":
            lines.append(b"content-length: %d" % len(one.response))
        elif framing != "closed":
            lines.append(b"transfer-encoding: chunked")
        else:
            peer.keep_alive = False
        await peer.write(b"\r\n".join(lines) + b"\r\n\r\n")
        for piece in one.pieces(framing):
            await peer.write(piece if framing in {"sized", "closed"} else chunk(piece))
        if framing not in {"sized", "closed"}:
            await peer.write(b"0\r\n\r\n")

    bench.node.script = script
    # The raw node reads sized requests only: direct, the request is always one.
    direct = exchange(bench, bench.node.port, one, chunked=False, closes=framing == "closed")
    through = exchange(bench, bench.gw.port, one, chunked=framing != "sized")
    assert through == direct
    assert direct.request == one.request
    assert direct.response == one.response
    wait_until(lambda: state.unloaded(bench.valkey), within_s=5, what="load = 0")


def test_the_corpus_holds_the_shapes_that_engines_have() -> None:
    assert {"chat", "chat_stream", "tools", "tools_stream", "logprobs", "logprobs_stream"} <= set(
        INDEX
    )
    assert {"reasoning", "reasoning_stream", "multimodal", "embeddings_base64"} <= set(INDEX)
    assert {"transcription", "subtitles", "speech"} <= set(INDEX)
    listed = {one[side] for one in INDEX.values() for side in ("request", "response")}
    assert listed | {"index.json"} == {file.name for file in CORPUS.iterdir()}
    for name in INDEX:
        one = shape(name)
        if one.request_type == "application/json" and "stream" in json.loads(one.request):
            said = json.loads(one.request).get("stream_options", {}).get("include_usage")
            assert said is not None or one.path not in {
                "/v1/chat/completions",
                "/v1/completions",
            }, name
