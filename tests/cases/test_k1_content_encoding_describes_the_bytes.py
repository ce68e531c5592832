"""K1: Content-Encoding describes the bytes that are sent, and usage is booked all the same."""

from __future__ import annotations

import json
import queue
import zlib
from typing import TYPE_CHECKING, Protocol

import brotli
import pytest

from tests.cases.bench import Bench, Booked, renewed, running_bench
from tests.support.rawclient import RawClient, ask, chat, post
from tests.support.rawnode import (
    DONE_EVENT,
    FINISH_EVENT,
    ROLE_EVENT,
    STREAM_HEAD,
    Peer,
    Request,
    chunk,
    content_event,
    event,
    sized,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.rawnode import Headers, Script

USAGE = {"prompt_tokens": 31, "completion_tokens": 17, "total_tokens": 48}
WHOLE = json.dumps({"choices": [{"message": {"content": "日本" * 500}}], "usage": USAGE}).encode()
EVENTS = [
    ROLE_EVENT,
    *(content_event(f"日本 t{i} ") for i in range(6)),
    FINISH_EVENT,
    event({"choices": [], "usage": USAGE}),
    DONE_EVENT,
]
# What the client accepts; None: it does not say.
ACCEPTS = {
    "gzip": "gzip",
    "br": "br",
    "identity": "identity",
    "none": None,
    "as a browser": "gzip, deflate, br, zstd",
    "anything": "*",
    "no identity": "gzip;q=1.0, identity;q=0",
    "nothing": "",
}


class Packer(Protocol):
    """What the standard library and brotli have in common."""

    def pack(self, data: bytes) -> bytes:
        """Compressed ``data``, flushed: the other side can read all of it."""
        ...

    def end(self) -> bytes:
        """The rest."""
        ...


class Gzip:
    def __init__(self) -> None:
        self._packer = zlib.compressobj(wbits=31)

    def pack(self, data: bytes) -> bytes:
        return self._packer.compress(data) + self._packer.flush(zlib.Z_SYNC_FLUSH)

    def end(self) -> bytes:
        return self._packer.flush()


class Brotli:
    def __init__(self) -> None:
        self._packer = brotli.Compressor()

    def pack(self, data: bytes) -> bytes:
        return bytes(self._packer.process(data) + self._packer.flush())

    def end(self) -> bytes:
        return bytes(self._packer.finish())


class Plain:
    def pack(self, data: bytes) -> bytes:
        return data

    def end(self) -> bytes:
        return b""


PACKERS: dict[str, type[Packer]] = {"gzip": Gzip, "br": Brotli, "": Plain}


def unpacked(client: RawClient) -> bytes:
    """The body as the header says that it is to be read."""
    encoding = client.headers.get(b"content-encoding", b"").decode()
    if encoding == "gzip":
        return zlib.decompress(client.body, wbits=31)
    if encoding == "br":
        return bytes(brotli.decompress(client.body))
    assert encoding in {"", "identity"}
    return client.body


class CompressingNode:
    """A node that compresses with ``encoding``: when it is asked to, or always.

    Of a stream it writes an event only when the client has got the one before: ``got``.
    """

    def __init__(self, encoding: str, *, always: bool = False) -> None:
        self._encoding = encoding
        self._always = always
        self.got: queue.SimpleQueue[None] = queue.SimpleQueue()

    def _chosen(self, request: Request) -> str:
        accepted = (request.header(b"accept-encoding") or b"").decode()
        return self._encoding if self._always or self._encoding in accepted else ""

    async def __call__(self, request: Request, peer: Peer) -> None:
        chosen = self._chosen(request)
        packer = PACKERS[chosen]()
        said = f"content-encoding: {chosen}\r\nvary: accept-encoding\r\n" if chosen else ""
        if not request.json().get("stream"):
            headers: Headers = [(b"content-type", b"application/json")]
            headers += [(b"content-encoding", chosen.encode())] if chosen else []
            await peer.write(sized(200, packer.pack(WHOLE) + packer.end(), headers))
            return
        await peer.write(STREAM_HEAD + said.encode() + b"transfer-encoding: chunked\r\n\r\n")
        for part in EVENTS:
            await peer.write(chunk(packer.pack(part)))
            while self.got.empty():
                await peer.sleep(0.001)
            self.got.get()
        if end := packer.end():
            await peer.write(chunk(end))
        await peer.write(b"0\r\n\r\n")


@pytest.fixture(scope="module")
def started() -> Iterator[Bench]:
    with running_bench() as bench:
        yield bench


@pytest.fixture
def bench(started: Bench) -> Bench:
    return renewed(started)


def request(*, stream: bool, accepts: str | None) -> bytes:
    raw = chat(model="m1", stream=stream, stream_options={"include_usage": True})
    if accepts is None:
        return raw
    return raw.replace(
        b"host: gateway\r\n", f"host: gateway\r\naccept-encoding: {accepts}\r\n".encode()
    )


def exchanged(
    bench: Bench, node: CompressingNode, *, stream: bool, accepts: str | None
) -> RawClient:
    """The answer; of a stream, each event has come through by itself."""
    bench.node.script = node
    with RawClient(bench.gw.port) as client:
        client.send(request(stream=stream, accepts=accepts))
        if stream:
            for _ in EVENTS:
                before = len(client.body)
                while len(client.body) == before:
                    assert not client.ended, "the client waits for the event that was written"
                    client._read()
                node.got.put(None)
        client.read_all()
    assert (client.status, client.complete) == (200, True)
    return client


@pytest.mark.parametrize("accepts", ACCEPTS)
@pytest.mark.parametrize("stream", [True, False], ids=["SSE", "JSON"])
@pytest.mark.parametrize("encoding", ["gzip", "br"])
def test_header_and_bytes_agree_and_usage_is_booked(
    bench: Bench, encoding: str, stream: bool, accepts: str
) -> None:
    before = bench.booked()
    client = exchanged(bench, CompressingNode(encoding), stream=stream, accepts=ACCEPTS[accepts])
    assert unpacked(client) == (b"".join(EVENTS) if stream else WHOLE)
    # The node is asked for plain bytes, once, whatever the client accepts.
    (seen,) = bench.node.requests
    asked = [value for name, value in seen.headers if name.lower() == b"accept-encoding"]
    assert asked == [b"identity"]
    assert b"content-encoding" not in client.headers
    bench.wait_unloaded()
    assert bench.booked() - before == Booked(prompt=31, output=17, samples=int(stream), ok=1)


# A node that compresses although it was asked not to


@pytest.mark.parametrize("accepts", ["gzip", "identity", "none"])
@pytest.mark.parametrize("stream", [True, False], ids=["SSE", "JSON"])
@pytest.mark.parametrize("encoding", ["gzip", "br"])
def test_what_a_node_compresses_unasked_passes_with_its_header_at_once(
    bench: Bench, encoding: str, stream: bool, accepts: str
) -> None:
    before = bench.booked()
    node = CompressingNode(encoding, always=True)
    client = exchanged(bench, node, stream=stream, accepts=ACCEPTS[accepts])
    assert client.headers[b"content-encoding"] == encoding.encode()
    assert unpacked(client) == (b"".join(EVENTS) if stream else WHOLE)
    bench.wait_unloaded()
    booked = bench.booked() - before
    assert (booked.ok, booked.failed, bench.streak()) == (1, 0, 0)
    if encoding == "gzip":  # br cannot be read without a library of its own
        assert booked == Booked(prompt=31, output=17, samples=int(stream), ok=1)


def _always(encoding: str, head: bytes, parts: list[bytes]) -> Script:
    async def script(request: Request, peer: Peer) -> None:
        peer.keep_alive = False
        packer = PACKERS[encoding]()
        await peer.write(
            head + f"content-encoding: {encoding}\r\nconnection: close\r\n\r\n".encode()
        )
        for part in parts:
            await peer.write(packer.pack(part))
        await peer.write(packer.end())

    return script


@pytest.mark.parametrize("encoding", ["gzip", "br"])
def test_a_compressed_stream_that_only_the_close_ends_is_whole(bench: Bench, encoding: str) -> None:
    bench.node.script = _always(encoding, STREAM_HEAD, EVENTS)
    client = ask(bench.gw.port, request(stream=True, accepts="gzip"))
    assert client.complete
    assert unpacked(client) == b"".join(EVENTS)
    bench.wait_unloaded()
    assert bench.streak() == 0


def test_a_compressed_stream_that_breaks_off_is_cut_and_gets_no_plain_bytes(bench: Bench) -> None:
    bench.node.script = _always("gzip", STREAM_HEAD, EVENTS[:4])
    client = ask(bench.gw.port, request(stream=True, accepts="gzip"))
    assert client.cut
    assert zlib.decompressobj(31).decompress(client.body) == b"".join(EVENTS[:4])
    bench.wait_unloaded()
    assert bench.streak() == 1


def test_an_error_event_in_a_compressed_stream_is_a_failure(bench: Bench) -> None:
    streak = bench.streak()
    told = event({"error": {"message": "CUDA out of memory"}})
    bench.node.script = _always("gzip", STREAM_HEAD, [*EVENTS[:4], told])
    client = ask(bench.gw.port, request(stream=True, accepts="gzip"))
    assert unpacked(client) == b"".join([*EVENTS[:4], told])
    bench.wait_unloaded()
    assert bench.streak() == streak + 1


@pytest.mark.parametrize("encoding", ["gzip", "br"])
@pytest.mark.parametrize("status", [400, 500])
def test_a_compressed_error_passes_with_its_header(
    bench: Bench, encoding: str, status: int
) -> None:
    packer = PACKERS[encoding]()
    told = b'{"error":{"message":"too long"}}'
    headers = [(b"content-type", b"application/json"), (b"content-encoding", encoding.encode())]
    answer = sized(status, packer.pack(told) + packer.end(), headers)

    async def script(request: Request, peer: Peer) -> None:
        await peer.write(answer)

    bench.node.script = script
    client = ask(bench.gw.port, chat(model="m1", stream=False))
    assert (client.status, unpacked(client)) == (status, told)
    bench.wait_unloaded()


@pytest.mark.parametrize("header", ["identity", "Identity"])
def test_an_encoding_that_is_none_changes_nothing(bench: Bench, header: str) -> None:
    before = bench.booked()
    headers = [(b"content-type", b"application/json"), (b"content-encoding", header.encode())]

    async def script(request: Request, peer: Peer) -> None:
        await peer.write(sized(200, WHOLE, headers))

    bench.node.script = script
    assert ask(bench.gw.port, chat(model="m1", stream=False)).body == WHOLE
    bench.wait_unloaded()
    assert bench.booked() - before == Booked(prompt=31, output=17, ok=1)


def test_a_compressed_request_is_refused_in_words_and_reaches_no_node(bench: Bench) -> None:
    packed = zlib.compress(b'{"model":"m1","messages":[]}', wbits=31)
    raw = post("/v1/chat/completions", packed)
    client = ask(bench.gw.port, raw.replace(b"host:", b"content-encoding: gzip\r\nhost:"))
    assert client.status in {400, 415}
    assert set(client.json()["error"]) == {"message", "type", "param", "code"}
    assert not bench.node.requests
