"""I1: an answer that the node cuts in its middle is an error, never a finished answer."""

from __future__ import annotations

import itertools
import json
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import openai
import pytest

from tests.cases.bench import Bench, Booked, renewed, running_bench
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import (
    COMPLETION,
    DONE_EVENT,
    FINISH_EVENT,
    ROLE_EVENT,
    STREAM_HEAD,
    Peer,
    Request,
    chunk,
    content_event,
    event,
    json_answer,
)
from tests.support.servers import NO_TLS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.rawnode import Script

FIVE = [content_event(f"t{i} ") for i in range(5)]
TOLD = ROLE_EVENT + b"".join(FIVE)
NEXT = event({"choices": [{"index": 0, "delta": {"content": "é"}}]}).replace(
    b"\\u00e9", "日".encode()
)
CHUNKED = STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n"
CLOSED = STREAM_HEAD + b"connection: close\r\n\r\n"
SIZED = STREAM_HEAD + b"content-length: 100000\r\n\r\n"
OLD = CLOSED.replace(b"HTTP/1.1", b"HTTP/1.0")
USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
LARGE = content_event("x" * 200_000)


@dataclass(frozen=True)
class Cut:
    """What the node writes before it breaks off, and the whole events in it.

    ``last`` is written when the client has had these. ``aborted``: the client's transfer must
    be cut too, because it is inside an event already.
    """

    written: bytes
    whole: bytes
    last: bytes = b""
    aborted: bool = False


def _chunks(*parts: bytes) -> bytes:
    return CHUNKED + b"".join(map(chunk, parts))


CUTS = {
    "after five tokens": Cut(_chunks(ROLE_EVENT, *FIVE), TOLD),
    "after the role event": Cut(_chunks(ROLE_EVENT), ROLE_EVENT),
    "after a comment": Cut(_chunks(b": keep-alive\n\n"), b": keep-alive\n\n"),
    "in the middle of an event": Cut(_chunks(TOLD, NEXT[:40]), TOLD),
    "in the middle of a character": Cut(_chunks(TOLD, NEXT[: NEXT.index(b"\xe6") + 1]), TOLD),
    "in the middle of a field name": Cut(_chunks(TOLD, NEXT[:3]), TOLD),
    "between the two line ends": Cut(_chunks(TOLD, NEXT[:-1]), TOLD),
    "between CR and LF": Cut(
        _chunks(TOLD.replace(b"\n", b"\r\n"), NEXT.replace(b"\n", b"\r\n")[:-1]),
        TOLD.replace(b"\n", b"\r\n"),
    ),
    "after half a [DONE]": Cut(_chunks(TOLD, b"data: [DO"), TOLD),
    "inside a chunk, between events": Cut(CHUNKED + b"1000\r\n" + TOLD, TOLD),
    "inside a chunk, inside an event": Cut(CHUNKED + b"1000\r\n" + TOLD + NEXT[:40], TOLD),
    "before a chunk's end": Cut(_chunks(TOLD)[:-2], TOLD),
    "after half a chunk-size line": Cut(_chunks(TOLD) + b"1f", TOLD),
    "after a chunk-size line": Cut(_chunks(TOLD) + b"1f\r\n", TOLD),
    "inside a chunk extension": Cut(_chunks(TOLD) + b"1f;name=val", TOLD),
    "inside the last chunk": Cut(_chunks(TOLD) + b"0\r\n", TOLD),
    "inside the trailers": Cut(_chunks(TOLD) + b"0\r\nx-checksum: 1\r\n", TOLD),
    "with a length that is not reached": Cut(SIZED + TOLD + NEXT[:40], TOLD),
    "where only the close would end the body": Cut(CLOSED + TOLD, TOLD),
    "of HTTP/1.0": Cut(OLD + TOLD + NEXT[:40], TOLD),
    "after the finish, before [DONE]": Cut(_chunks(TOLD, FINISH_EVENT), TOLD + FINISH_EVENT),
    "after the finish, inside the usage": Cut(
        CLOSED + TOLD + FINISH_EVENT + b'data: {"choices":[],"usage":{"prompt', TOLD + FINISH_EVENT
    ),
    "after usage so far": Cut(
        _chunks(TOLD, event({"choices": [], "usage": USAGE})),
        TOLD + event({"choices": [], "usage": USAGE}),
    ),
    "after a chunk that is none": Cut(_chunks(TOLD), TOLD, last=b"zz\r\nnonsense\r\n"),
    "by a chunk that is none, behind an event": Cut(
        _chunks(ROLE_EVENT), TOLD, last=chunk(b"".join(FIVE)) + b"-1\r\n"
    ),
    "by a chunk without its end": Cut(
        _chunks(ROLE_EVENT), TOLD, last=chunk(b"".join(FIVE))[:-2] + b"xx"
    ),
    "inside a very large event": Cut(_chunks(TOLD, LARGE[:-9]), TOLD + LARGE[:-9], aborted=True),
    "behind a very large event": Cut(_chunks(TOLD, LARGE, NEXT[:9]), TOLD + LARGE),
}


@pytest.fixture(scope="module")
def started() -> Iterator[Bench]:
    with running_bench(2) as bench:
        yield bench


@pytest.fixture
def bench(started: Bench) -> Bench:
    return renewed(started)


def breaking(
    written: bytes, may_break: threading.Event, *, reset: bool, last: bytes = b""
) -> Script:
    """Write, wait until the client has what is whole of it, perhaps write on, break off."""

    async def script(request: Request, peer: Peer) -> None:
        await peer.write(written)
        while not may_break.is_set():
            await peer.sleep(0.002)
        if last:
            await peer.write(last)
            await peer.sleep(0.05)
        peer.reset() if reset else peer.close()

    return script


def assert_told_as_an_error(client: RawClient, whole: bytes, *, aborted: bool = False) -> None:
    """All whole events, then one error event or a cut; nothing that looks like an end."""
    ending = client.body.removeprefix(whole)
    assert client.body.startswith(whole)
    if aborted:
        assert client.cut
        assert ending == b""
        return
    assert client.complete
    (told,) = [e for e in ending.split(b"\n\n") if e]
    error = json.loads(told.removeprefix(b"data: "))
    assert set(error) == {"error"}
    assert set(error["error"]) == {"message", "type", "param", "code"}
    assert b"finish_reason" not in ending
    assert b"[DONE]" not in client.body


@pytest.mark.parametrize("how", ["RST", "FIN"])
@pytest.mark.parametrize("name", CUTS)
def test_a_stream_is_cut(bench: Bench, name: str, how: str) -> None:
    cut = CUTS[name]
    may_break = threading.Event()
    bench.node.script = breaking(cut.written, may_break, reset=how == "RST", last=cut.last)
    before, streak = bench.booked(), bench.streak()
    request = chat(model="m1", stream_options={"include_usage": True})
    with RawClient(bench.gw.port) as client:
        client.send(request)
        while (
            len(client.body) < len(cut.whole if not cut.last else ROLE_EVENT) and not client.ended
        ):
            client._read()
        may_break.set()
        client.read_all()
    assert (client.status, client.headers[b"x-leaseway-attempts"]) == (200, b"1")
    assert_told_as_an_error(client, cut.whole, aborted=cut.aborted)
    bench.wait_unloaded()
    booked = bench.booked() - before
    assert (booked.ok, booked.failed) == (0, 1)
    assert booked.samples == (0 if cut.whole in {ROLE_EVENT, b": keep-alive\n\n"} else 1)
    assert bench.streak() == streak + 1
    assert [len(node.requests) for node in bench.nodes] == [1, 0], "no retry"


# What the node had said before it broke off makes it whole


@pytest.mark.parametrize("how", ["RST", "FIN"])
@pytest.mark.parametrize(
    "written",
    [
        _chunks(TOLD, FINISH_EVENT, DONE_EVENT),
        _chunks(TOLD, FINISH_EVENT, DONE_EVENT) + b"0\r\n",
        SIZED + TOLD + FINISH_EVENT + DONE_EVENT,
    ],
    ids=["no last chunk", "half a last chunk", "a wrong length"],
)
def test_an_answer_that_has_said_done_is_whole_whatever_its_framing(
    bench: Bench, written: bytes, how: str
) -> None:
    whole = TOLD + FINISH_EVENT + DONE_EVENT
    may_break = threading.Event()
    bench.node.script = breaking(written, may_break, reset=how == "RST")
    before = bench.booked()
    with RawClient(bench.gw.port) as client:
        client.send(chat(model="m1"))
        while len(client.body) < len(whole) and not client.ended:
            client._read()
        may_break.set()
        assert client.read_all() == whole
        assert client.complete
    bench.wait_unloaded()
    assert bench.booked() - before == Booked(output=5, samples=1, ok=1)
    assert bench.streak() == 0


# Nothing of the answer has gone out yet: another node may do it


@pytest.mark.parametrize("how", ["RST", "FIN"])
@pytest.mark.parametrize(
    "written",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        CHUNKED,
        CHUNKED + b"1f",
        CHUNKED + b"1000\r\n" + ROLE_EVENT[:30],
        CLOSED,
        CLOSED + ROLE_EVENT[:-1],
        SIZED,
    ],
    ids=["nothing", "half a head", "the head", "half a chunk-size line", "half an event",
         "the head, no framing", "half an event, no framing", "the head, with a length"],
)  # fmt: skip
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "in one piece"])
def test_a_cut_before_the_first_event_is_no_200(
    bench: Bench, written: bytes, how: str, stream: bool
) -> None:
    may_break = threading.Event()
    may_break.set()
    if not stream:
        written = written.replace(b"text/event-stream", b"application/json")
        written = written.replace(ROLE_EVENT[:30], b'{"id":"chatcmpl-1","choices":[')
        written = written.replace(ROLE_EVENT[:-1], b'{"id":"chatcmpl-1","choices":[')

    async def script(request: Request, peer: Peer) -> None:
        await peer.write(written)
        await peer.sleep(0.02)
        peer.reset() if how == "RST" else peer.close()

    bench.node.script = script
    before, streak = bench.booked(), bench.streak()
    client = ask(bench.gw.port, chat(model="m1", stream=stream))
    assert client.complete
    assert client.status == 502
    assert client.headers[b"content-type"] == b"application/json"
    assert set(client.json()["error"]) == {"message", "type", "param", "code"}
    bench.wait_unloaded()
    assert (bench.booked() - before) == Booked(failed=1)
    assert bench.streak() == streak + 1
    assert len(bench.node.requests) == 1


# Answers in one piece


def _answer(size: int) -> bytes:
    message = {"role": "assistant", "content": "x" * size}
    return json.dumps({"choices": [{"message": message}], "usage": USAGE}).encode()


JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize("how", ["RST", "FIN"])
@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
@pytest.mark.parametrize("size", [1000, 1_000_000], ids=["small", "large"])
def test_an_answer_in_one_piece_is_cut(bench: Bench, size: int, framing: str, how: str) -> None:
    body = _answer(size)
    half = body[: len(body) - 30]
    written = JSON_HEAD + {
        "length": b"content-length: %d\r\n\r\n" % len(body) + half,
        "chunked": b"transfer-encoding: chunked\r\n\r\n" + b"%x\r\n" % len(body) + half,
        "close": b"connection: close\r\n\r\n" + half,
    }[framing]  # fmt: skip
    may_break = threading.Event()
    bench.node.script = breaking(written, may_break, reset=how == "RST")
    before, streak = bench.booked(), bench.streak()
    with RawClient(bench.gw.port) as client:
        client.send(chat(model="m1", stream=False))
        if size > 256 * 1024:  # more than is held back: it has begun
            while len(client.body) < len(half) and not client.ended:
                client._read()
        may_break.set()
        client.read_all()
    if size > 256 * 1024:
        assert client.status == 200
        assert client.cut, "the client's library reports the cut"
        assert client.body == half
    else:
        assert (client.status, client.complete) == (502, True)
        assert client.json()["error"]["code"]
    bench.wait_unloaded()
    assert (bench.booked() - before).failed == 1
    assert bench.streak() == streak + 1


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
def test_a_small_answer_that_is_cut_is_asked_of_another_node(bench: Bench, framing: str) -> None:
    half = _answer(1000)[:-30]
    written = (
        JSON_HEAD
        + {
            "length": b"content-length: 2000\r\n\r\n" + half,
            "chunked": b"transfer-encoding: chunked\r\n\r\n7d0\r\n" + half,
            "close": b"connection: close\r\n\r\n" + half,
        }[framing]
    )
    turns = itertools.count()

    async def script(request: Request, peer: Peer) -> None:
        """The first request of all is cut, on whichever node; the second is answered well."""
        if next(turns):
            await json_answer()(request, peer)
            return
        await peer.write(written)
        peer.close()

    for node in bench.nodes:
        node.script = script
    client = ask(bench.gw.port, chat(model="m", stream=False))
    assert (client.status, client.json()) == (200, COMPLETION)
    assert client.headers[b"x-leaseway-attempts"] == b"2"
    assert [len(node.requests) for node in bench.nodes] == [1, 1]
    bench.wait_unloaded()


# The official client


@pytest.mark.parametrize(
    "name", ["after five tokens", "after the role event", "in the middle of an event",
             "after the finish, before [DONE]", "inside a very large event"],
)  # fmt: skip
def test_the_official_client_raises(bench: Bench, name: str) -> None:
    may_break = threading.Event()
    bench.node.script = breaking(CUTS[name].written, may_break, reset=True)
    with (
        openai.OpenAI(
            base_url=f"{bench.gw.url}/v1",
            api_key="-",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False, verify=NO_TLS),
        ) as sdk,
        sdk.chat.completions.create(
            model="m1", messages=[{"role": "user", "content": "hi"}], stream=True
        ) as stream,
    ):
        may_break.set()  # the head is here, and with it what was written
        # Its own error for the error event, the HTTP library's for a cut transfer.
        with pytest.raises(Exception, match=r"broke off|incomplete|Connection error") as caught:
            list(stream)
    assert isinstance(caught.value, openai.APIError) or CUTS[name].aborted
    bench.wait_unloaded()
