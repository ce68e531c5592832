"""H3: no line-length limit below the body limit, and no memory for it."""

from __future__ import annotations

import base64
import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from tests.support.rawclient import RawClient, ask, chat
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
    events,
    sse_answer,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

LINE = 8 * MIB
BASE64 = base64.b64encode(random.Random(3).randbytes(LINE * 3 // 4)).decode()
USAGE = {"prompt_tokens": 31, "completion_tokens": 17, "total_tokens": 48}
USAGE_EVENT = event({"choices": [], "usage": USAGE})
END = FINISH_EVENT + USAGE_EVENT + DONE_EVENT
SOME = b"".join(content_event(f"t{i} ") for i in range(5))


def _tool(arguments: str) -> dict[str, Any]:
    return {
        "tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": arguments}}]
    }


def _choice(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish, **more}]})


IMAGE = _choice({"images": [{"image_url": {"url": f"data:image/png;base64,{BASE64}"}}]})


@dataclass(frozen=True)
class Long:
    """A stream with a long line: what is to be booked."""

    raw: bytes
    booked: Booked


WITH_USAGE = Booked(prompt=31, output=17, samples=1, ok=1)
STREAMS = {
    "image, then normal events": Long(ROLE_EVENT + IMAGE + SOME + END, WITH_USAGE),
    "image as the first event": Long(IMAGE + SOME + END, WITH_USAGE),
    "image in the middle": Long(ROLE_EVENT + SOME + IMAGE + SOME + END, WITH_USAGE),
    "two images in a row": Long(ROLE_EVENT + IMAGE * 2 + END, WITH_USAGE),
    "image as the last content": Long(ROLE_EVENT + SOME + IMAGE + END, WITH_USAGE),
    "arguments of a tool call": Long(ROLE_EVENT + _choice(_tool(BASE64)) + END, WITH_USAGE),
    "escaped arguments of a tool call": Long(
        ROLE_EVENT + _choice(_tool(json.dumps({"a": ['"', "\\", "\n"] * (LINE // 30)}))) + END,
        WITH_USAGE,
    ),
    "logprobs": Long(
        ROLE_EVENT + _choice({"content": "a"}, logprobs={"content": [0.25] * (LINE // 5)}) + END,
        WITH_USAGE,
    ),
    "finish and usage at the end of the line": Long(
        ROLE_EVENT
        + event({"choices": [{"delta": {"content": BASE64}, "finish_reason": "stop"}],
                 "usage": USAGE})
        + DONE_EVENT,
        WITH_USAGE,
    ),
    "CRLF": Long((ROLE_EVENT + IMAGE + SOME + END).replace(b"\n", b"\r\n"), WITH_USAGE),
    "lone CR": Long((ROLE_EVENT + IMAGE + SOME + END).replace(b"\n", b"\r"), WITH_USAGE),
    "comment": Long(
        ROLE_EVENT + SOME + b":" + BASE64.encode() + b"\n\n" + SOME + END, WITH_USAGE
    ),
    "field that nobody knows": Long(
        ROLE_EVENT + SOME + b"x: " + BASE64.encode() + b"\n" + SOME + END, WITH_USAGE
    ),
    "output of a response, complete": Long(
        b'data: {"type":"response.output_text.delta","delta":"a"}\n\n'
        b'event: response.completed\n'
        b'data: {"type":"response.completed","response":{"output":"'
        + BASE64.encode()
        + b'","usage":{"input_tokens":31,"output_tokens":17}}}\n\n',
        WITH_USAGE,
    ),
    "error that echoes its input": Long(
        ROLE_EVENT + SOME + event({"error": {"message": BASE64, "code": 500}}),
        Booked(samples=1, failed=1),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def started() -> Iterator[Bench]:
    with running_bench() as bench:
        bench.node.script = sse_answer(events(5))
        for stream in (True, False):  # what the first requests need is there
            ask(bench.gw.port, chat(model="m1", stream=stream))
        yield bench


@pytest.fixture
def bench(started: Bench) -> Bench:
    return renewed(started)


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("sized", [True, False], ids=["chunked", "ended by the close"])
def test_a_line_of_8_mib_passes_whole_and_what_follows_is_seen(
    bench: Bench, name: str, sized: bool
) -> None:
    long = STREAMS[name]
    for size in (len(long.raw), 65_536):
        bench.node.script = in_pieces(STREAM_HEAD, cut_every(long.raw, size), sized=sized)
        before = bench.booked()
        with RawClient(bench.gw.port) as client, PeakMemory(bench.gw) as memory:
            client.send(chat(model="m1", stream_options={"include_usage": True}))
            body = client.read_all()
            assert memory.grown < 4 * LINE
        assert client.complete
        assert body == long.raw
        bench.wait_unloaded()
        booked = bench.booked() - before
        if long.booked.failed:  # of an error, what it booked before is not what is tested here
            assert (booked.failed, booked.samples) == (1, 1)
        else:
            assert booked == long.booked


def test_a_long_line_is_passed_on_while_it_comes(bench: Bench) -> None:
    half = len(IMAGE) // 2
    arrived: list[int] = []

    async def script(request: Request, peer: Peer) -> None:
        await peer.write(STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n")
        await peer.write(chunk(ROLE_EVENT) + chunk(IMAGE[:half]))
        while not arrived:  # the rest comes when the client has this half
            await peer.sleep(0.005)
        await peer.write(chunk(IMAGE[half:]) + chunk(END) + b"0\r\n\r\n")

    bench.node.script = script
    with RawClient(bench.gw.port) as client:
        client.send(chat(model="m1", stream_options={"include_usage": True}))
        while len(client.body) < len(ROLE_EVENT) + half:
            client._read()
        arrived.append(len(client.body))
        assert client.read_all() == ROLE_EVENT + IMAGE + END


def _completion(content: str, *, usage_first: bool) -> bytes:
    message = {"role": "assistant", "content": content, "tool_calls": []}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    parts: dict[str, Any] = {"id": "x", "choices": choices, "usage": USAGE}
    if usage_first:  # as llama.cpp does for embeddings
        parts = {"usage": USAGE, "choices": choices}
    return json.dumps(parts).encode()


@pytest.mark.parametrize("usage_first", [False, True], ids=["usage last", "usage first"])
@pytest.mark.parametrize("sized", [True, False], ids=["chunked", "ended by the close"])
def test_a_line_of_8_mib_in_an_answer_in_one_piece_passes_whole(
    bench: Bench, usage_first: bool, sized: bool
) -> None:
    raw = _completion(BASE64, usage_first=usage_first)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
    for size in (len(raw), 65_536):
        bench.node.script = in_pieces(head, cut_every(raw, size), sized=sized)
        before = bench.booked()
        with RawClient(bench.gw.port) as client, PeakMemory(bench.gw) as memory:
            client.send(chat(model="m1", stream=False))
            body = client.read_all()
            assert memory.grown < 4 * LINE
        assert client.complete
        assert body == raw
        bench.wait_unloaded()
        assert bench.booked() - before == Booked(prompt=31, output=17, ok=1)


def test_a_long_line_of_a_header_passes_up_to_what_the_client_sent(bench: Bench) -> None:
    # A header of 30 KiB is no line of a body, but the same kind of limit.
    value = b"x" * 30_000
    request = chat(model="m1", stream=False).replace(
        b"host: gateway\r\n", b"host: gateway\r\nx-long: " + value + b"\r\n"
    )
    client = ask(bench.gw.port, request)
    assert client.status == 200
    assert bench.node.requests[-1].header(b"x-long") == value
