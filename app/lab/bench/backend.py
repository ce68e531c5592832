"""The stand-in for an inference engine: as cheap as Python can make one.

Answers are built once, before the first request; a request costs one parse of its small body. The
bench measures what stands in front of this process, so it must never be what sets the pace.
"""

import argparse
import asyncio
from dataclasses import dataclass
from typing import cast

import httptools
import orjson
import uvloop

from app.lab.bench.workloads import WORKLOADS, Workload, json_answer

CHAT_PATH = b"/v1/chat/completions"
MODELS_BODY = b'{"object":"list","data":[{"id":"demo","object":"model","owned_by":"bench"}]}'
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: bench\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)


@dataclass(frozen=True, slots=True)
class Stream:
    """A streamed answer, framed and cut into what each turn of the loop writes."""

    turns: tuple[tuple[bytes, ...], ...]
    gap_s: float


def sized(status: bytes, body: bytes) -> bytes:
    """A whole JSON response with its length announced."""
    head = b"HTTP/1.1 %b\r\nserver: bench\r\ncontent-type: application/json\r\n" % status
    return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)


def framed(workload: Workload) -> Stream:
    """Chunked framing, one chunk an event, the closing chunk behind the last."""
    frames = [b"%x\r\n%b\r\n" % (len(event), event) for event in workload.sse_events()]
    frames[0] = STREAM_HEAD + frames[0]
    frames[-1] += b"0\r\n\r\n"
    step = workload.per_turn
    turns = (tuple(frames[at : at + step]) for at in range(0, len(frames), step))
    return Stream(tuple(turns), workload.gap_s)


STREAMS = {name: framed(workload) for name, workload in WORKLOADS.items() if workload.events}
JSON_RESPONSE = sized(b"200 OK", json_answer())
GET_RESPONSES = {
    b"/v1/models": sized(b"200 OK", MODELS_BODY),
    b"/health": sized(b"200 OK", b'{"status":"ok"}'),
}
NOT_FOUND = sized(b"404 Not Found", b'{"error":{"message":"no such path","code":404}}')
BAD_REQUEST = sized(b"400 Bad Request", b'{"error":{"message":"not JSON","code":400}}')


def answer_to(path: bytes, body: bytes) -> bytes | Stream:
    """A request that asks for a stream gets one; which one is named in its `user` field."""
    if path != CHAT_PATH:
        return GET_RESPONSES.get(path, NOT_FOUND)
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError:
        return BAD_REQUEST
    if not request.get("stream"):
        return JSON_RESPONSE
    return STREAMS.get(request.get("user"), STREAMS["burst"])


class BackendProtocol(asyncio.Protocol):
    """One connection. No pipelining: a client here waits for its answer before it asks again."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def on_message_begin(self) -> None:
        self._path = self._body = b""

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        answer = answer_to(self._path, self._body)
        if isinstance(answer, Stream):
            self._write_turn(answer, 0, self._loop.time())
        else:
            self._transport.write(answer)
            self._end()

    def _write_turn(self, stream: Stream, turn: int, due: float) -> None:
        if self._transport.is_closing():
            return
        for frame in stream.turns[turn]:
            self._transport.write(frame)
        if turn + 1 == len(stream.turns):
            self._end()
        elif stream.gap_s:  # reckoned from the first event, so that lateness does not add up
            due += stream.gap_s
            self._loop.call_at(due, self._write_turn, stream, turn + 1, due)
        else:
            self._loop.call_soon(self._write_turn, stream, turn + 1, due)

    def _end(self) -> None:
        if not self._parser.should_keep_alive():
            self._transport.close()


async def listen(port: int, host: str = "127.0.0.1") -> asyncio.Server:
    """Start answering; port 0 picks a free one."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(BackendProtocol, host, port, backlog=4096)


async def _serve(port: int) -> None:
    server = await listen(port)
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(_serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
