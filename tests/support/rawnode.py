"""A scriptable inference node on raw sockets: bytes, write sizes and times are exact.

It runs in a thread of its own with its own event loop, so that tests of either kind can use
it: ``with RawNode(script) as node:``. A script answers one request; what it does not write is
not written. The ready-made ones stand at the end of the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any, Self

Headers = list[tuple[bytes, bytes]]

RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close() sends RST (socket(7))
_BODY_LIMIT = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Request:
    """One complete request. ``headers`` are as sent, in order; ``at`` is monotonic."""

    method: str
    target: str
    headers: Headers
    body: bytes
    connection: int
    at: float

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header; ``name`` in lower case."""
        return next((v for n, v in self.headers if n.lower() == name), None)

    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)


class PeerGone(Exception):  # noqa: N818 - what a script is for, not its fault
    """The gateway closed the connection while the request was open."""


class Peer:
    """The gateway's end, as a script sees it: one per connection.

    ``keep_alive`` set to False closes the connection after this answer. ``gone_at`` is when
    the gateway closed or reset it, on the monotonic clock.
    """

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.number = number
        self.keep_alive = True
        self.gone_at: float | None = None
        self._reader = reader
        self._writer = writer
        self._gone = asyncio.Event()
        self._left = False  # this side has closed

    async def write(self, data: bytes) -> None:
        """Write exactly these bytes in one go. Raises ``PeerGone``."""
        if self._gone.is_set():
            raise PeerGone
        self._writer.write(data)
        try:
            await self._writer.drain()
        except OSError as exc:
            self._note_gone()
            raise PeerGone from exc

    async def sleep(self, seconds: float) -> None:
        """Wait; a gateway that closes meanwhile ends the script with ``PeerGone``."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._gone.wait(), seconds)
            raise PeerGone

    async def wait_closed(self) -> None:
        """Wait until the gateway closes or resets the connection."""
        await self._gone.wait()

    def reset(self) -> None:
        """Close with RST."""
        self._left = True
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self._writer.transport.abort()

    def close(self) -> None:
        """Close with FIN, after what was written."""
        self._left = True
        self._writer.close()

    @property
    def closing(self) -> bool:
        """Whether this side has closed."""
        return self._left

    @property
    def over(self) -> bool:
        """Whether nothing more can come from the gateway."""
        return self._gone.is_set()

    def _note_gone(self) -> None:
        if not self._gone.is_set():
            self.gone_at = None if self._left else monotonic()
            self._gone.set()

    async def _watch(self, held: bytearray, more: asyncio.Event) -> None:
        """Read for ever: bytes go to ``held``, the end of the stream is noted at once."""
        try:
            while data := await self._reader.read(262_144):
                held += data
                more.set()
        except OSError:
            pass
        self._note_gone()
        more.set()


Script = Callable[[Request, Peer], Awaitable[None]]


class RawNode:
    """A node at ``url``. ``script`` may be replaced at any time; it counts from the next request.

    ``requests`` are the complete requests it got, ``open`` how many are unanswered now,
    ``max_open`` the most there ever were, ``connections`` how many connections were accepted,
    ``connected`` how many are up now, ``left`` the requests that were open when the gateway
    closed their connection, with the time, ``closes`` these times. ``GET /v1/models`` and
    ``GET /health`` are answered well and kept out of ``requests`` and ``open``; ``probes``
    counts them. With ``probes_fail`` they are answered with 500. ``GET /metrics`` gets
    ``metrics_page``, when there is one.
    """

    def __init__(self, script: Script | None = None, *, models: tuple[str, ...] = ("m",)) -> None:
        self.script: Script = script or json_answer()
        self.models = models
        self.requests: list[Request] = []
        self.left: list[tuple[Request, float]] = []
        self.errors: list[BaseException] = []
        self.open = 0
        self.max_open = 0
        self.connections = 0
        self.connected = 0
        self.probes = 0
        self.probes_fail = False
        self.metrics_page = b""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="raw node", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def closes(self) -> list[float]:
        """When the gateway closed or reset a connection during an open request."""
        return [at for _, at in self.left]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        assert not self._thread.is_alive()
        if exc[0] is None and self.errors:
            raise self.errors[0]

    def _run(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        self._listener.setblocking(False)
        loop.add_reader(self._listener, self._accept)
        loop.run_forever()
        loop.remove_reader(self._listener)
        self._listener.close()
        loop.run_until_complete(asyncio.sleep(0))  # what was accepted gets to its `try`
        for task in self._tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        loop.run_until_complete(asyncio.sleep(0))  # closed transports let go of their sockets
        loop.close()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = self._listener.accept()
                self.connections += 1
                task = self._loop.create_task(self._converse(sock, self.connections))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _converse(self, sock: socket.socket, number: int) -> None:
        """One connection: request after request, until either side closes."""
        try:
            sock.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=sock, limit=2**20)
        except BaseException:
            sock.close()
            raise
        peer = Peer(number, reader, writer)
        held, more = bytearray(), asyncio.Event()
        self.connected += 1
        watch = self._loop.create_task(peer._watch(held, more))
        try:
            while not peer.closing:
                request = await self._request(peer, held, more)
                if request is None:
                    break
                await self._answer(request, peer)
                if not peer.keep_alive:
                    break
        except Exception as exc:  # a script that fails is the test's failure
            self.errors.append(exc)
        finally:
            self.connected -= 1
            watch.cancel()
            if not peer.closing:
                peer.close()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    async def _request(self, peer: Peer, held: bytearray, more: asyncio.Event) -> Request | None:
        """The next complete request; None when the gateway has closed before."""

        async def until(found: Callable[[], bool]) -> bool:
            while not found():
                if peer.over:
                    return False
                more.clear()
                await more.wait()
            return True

        if not await until(lambda: b"\r\n\r\n" in held):
            return None
        end = held.index(b"\r\n\r\n")
        first, *lines = bytes(held[:end]).split(b"\r\n")
        method, target, _ = first.decode("latin-1").split(" ", 2)
        headers = [(n, v.strip()) for n, _, v in (line.partition(b":") for line in lines)]
        lengths = [int(v) for n, v in headers if n.lower() == b"content-length"]
        size = lengths[0] if lengths else 0
        assert size <= _BODY_LIMIT
        del held[: end + 4]
        if not await until(lambda: len(held) >= size):
            return None
        body = bytes(held[:size])
        del held[:size]
        return Request(method, target, headers, body, peer.number, monotonic())

    async def _answer(self, request: Request, peer: Peer) -> None:
        if request.method == "GET" and request.target == "/metrics" and self.metrics_page:
            page = self.metrics_page
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n"
            await peer.write(head % len(page) + page)
            return
        if request.method == "GET" and request.target.endswith(("/v1/models", "/health")):
            self.probes += 1
            data = [{"id": model, "object": "model"} for model in self.models]
            body = {"object": "list", "data": data}
            answer = json_answer(500 if self.probes_fail else 200, body)
            with contextlib.suppress(PeerGone):
                await answer(request, peer)
            return
        self.requests.append(request)
        self.open += 1
        self.max_open = max(self.max_open, self.open)
        try:
            await self.script(request, peer)
            await asyncio.sleep(0)
        except PeerGone:
            pass
        finally:
            self.open -= 1
            if peer.gone_at is not None:
                self.left.append((request, peer.gone_at))


# Ready-made answers


def sized(status: int, body: bytes, headers: Headers | None = None) -> bytes:
    """A whole answer with Content-Length, as bytes."""
    lines = [b"HTTP/1.1 %d Said" % status, b"content-length: %d" % len(body)]
    lines += [n + b": " + v for n, v in headers or []]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body (RFC 9112, 7.1)."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(payload: Any) -> bytes:
    """One SSE event that carries JSON."""
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


def _delta(delta: dict[str, Any], finish: str | None = None) -> bytes:
    return event(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        }
    )


ROLE_EVENT = _delta({"role": "assistant", "content": ""})
FINISH_EVENT = _delta({}, "stop")
DONE_EVENT = b"data: [DONE]\n\n"


def content_event(text: str) -> bytes:
    """One content delta in the OpenAI chunk format."""
    return _delta({"content": text})


def events(n: int) -> list[bytes]:
    """A whole answer: role event, ``n`` content events, finish, ``[DONE]``."""
    content = [content_event(f"t{i} ") for i in range(n)]
    return [ROLE_EVENT, *content, FINISH_EVENT, DONE_EVENT]


COMPLETION: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
}

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"


def json_answer(
    status: int = 200, body: Any = None, headers: Headers | None = None, *, after_s: float = 0
) -> Script:
    """Answer in one piece: ``body`` as JSON, or as it is when it is bytes.

    ``after_s`` is the time before the first byte; ``headers`` replace the content type.
    """
    content = COMPLETION if body is None else body
    payload = content if isinstance(content, bytes) else json.dumps(content).encode()
    answer = sized(status, payload, headers or [(b"content-type", b"application/json")])

    async def script(request: Request, peer: Peer) -> None:
        if after_s:
            await peer.sleep(after_s)
        await peer.write(answer)

    return script


def sse_answer(parts: list[bytes], gap_s: float = 0, *, chunked: bool = True) -> Script:
    """Stream ``parts``, one write each, ``gap_s`` apart; not chunked means ended by the close."""

    async def script(request: Request, peer: Peer) -> None:
        await _stream_head(peer, chunked=chunked)
        for i, part in enumerate(parts):
            if gap_s and i:
                await peer.sleep(gap_s)
            await peer.write(chunk(part) if chunked else part)
        if chunked:
            await peer.write(b"0\r\n\r\n")

    return script


def stream_forever(gap_s: float, for_s: float = 60) -> Script:
    """A role event, then a content event every ``gap_s`` for ``for_s``; then a proper end."""

    async def script(request: Request, peer: Peer) -> None:
        await _stream_head(peer, chunked=True)
        await peer.write(chunk(ROLE_EVENT))
        until, i = monotonic() + for_s, 0
        while monotonic() < until:
            await peer.write(chunk(content_event(f"t{i} ")))
            await peer.sleep(gap_s)
            i += 1
        await peer.write(chunk(FINISH_EVENT) + chunk(DONE_EVENT) + b"0\r\n\r\n")

    return script


async def _stream_head(peer: Peer, *, chunked: bool) -> None:
    if not chunked:
        peer.keep_alive = False
    framing = b"transfer-encoding: chunked" if chunked else b"connection: close"
    await peer.write(STREAM_HEAD + framing + b"\r\n\r\n")


def hang() -> Script:
    """Take the request and never answer."""

    async def script(request: Request, peer: Peer) -> None:
        await peer.wait_closed()

    return script


def reset_before_headers() -> Script:
    """RST instead of an answer."""

    async def script(request: Request, peer: Peer) -> None:
        peer.reset()

    return script


def close_without_answer() -> Script:
    """FIN instead of an answer."""

    async def script(request: Request, peer: Peer) -> None:
        peer.close()

    return script


def write_then_reset(data: bytes, after_s: float = 0.02) -> Script:
    """Write some bytes, let them arrive, then RST."""

    async def script(request: Request, peer: Peer) -> None:
        await peer.write(data)
        await peer.sleep(after_s)
        peer.reset()

    return script


def raw_answer(data: bytes, *, keep_alive: bool = False) -> Script:
    """Write these bytes; then close, unless ``keep_alive``."""

    async def script(request: Request, peer: Peer) -> None:
        peer.keep_alive = keep_alive
        await peer.write(data)

    return script
