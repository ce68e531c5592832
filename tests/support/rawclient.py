"""An HTTP client on a raw socket: what is sent, and when and how it leaves, is exact."""

from __future__ import annotations

import json
import socket
from time import monotonic
from typing import Any, Self

import httptools

from tests.support.rawnode import RESET_ON_CLOSE


def chat(
    *, stream: bool | None = True, model: str = "m", request_id: str | None = None, **more: Any
) -> bytes:
    """The bytes of a chat completion request; ``more`` are further fields of its body."""
    fields: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    if stream is not None:
        fields["stream"] = stream
    return post("/v1/chat/completions", json.dumps(fields | more).encode(), request_id=request_id)


def post(target: str, body: bytes, *, request_id: str | None = None) -> bytes:
    """The bytes of a POST of JSON."""
    lines = [
        f"POST {target} HTTP/1.1",
        "host: gateway",
        "content-type: application/json",
        f"content-length: {len(body)}",
    ]
    if request_id is not None:
        lines.append(f"x-request-id: {request_id}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class RawClient:
    """One connection to a replica, one exchange: ``with RawClient(gateway.port) as client:``.

    ``status``, ``headers`` (lower case, last one counts) and ``body`` are what has come so far;
    ``complete`` tells that the answer has ended properly, ``cut`` that it broke off.
    """

    def __init__(self, port: int, *, timeout_s: float = 10) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._parser = httptools.HttpResponseParser(self)
        self._headed = False
        self._body = bytearray()
        self.headers: dict[bytes, bytes] = {}
        self.complete = False
        self.cut = False
        self.closed_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> Self:
        """Send these bytes."""
        self._socket.sendall(data)
        return self

    def close(self) -> None:
        """close() without reading on."""
        self.closed_at = monotonic()
        self._socket.close()

    def reset(self) -> None:
        """Close with RST."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self.close()

    @property
    def status(self) -> int:
        """Status of the answer; 0 until its head is here."""
        return self._parser.get_status_code() if self._headed else 0

    @property
    def body(self) -> bytes:
        """The body so far, without its framing."""
        return bytes(self._body)

    @property
    def ended(self) -> bool:
        """Whether nothing more comes."""
        return self.complete or self.cut

    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self._body)

    def read_head(self) -> int:
        """Wait for the head; the status, 0 when the connection closed without one."""
        while not self._headed and not self.ended:
            self._read()
        return self.status

    def read_events(self, n: int) -> bytes:
        """Wait until ``n`` SSE events in all are here; the body so far."""
        while self._body.count(b"\n\n") < n and not self.ended:
            self._read()
        return self.body

    def read_all(self) -> bytes:
        """Wait for the end of the answer; the body."""
        while not self.ended:
            self._read()
        return self.body

    def _read(self) -> None:
        try:
            data = self._socket.recv(262_144)
        except ConnectionResetError:
            data = b""
        if not data:
            self.cut = not self.complete
            return
        self._parser.feed_data(data)

    # httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._headed = True

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self.complete = True


def ask(port: int, request: bytes | None = None, *, timeout_s: float = 10) -> RawClient:
    """One whole exchange: the client with the complete answer, its connection closed."""
    with RawClient(port, timeout_s=timeout_s) as client:
        client.send(request or chat(stream=False))
        client.read_all()
        return client
