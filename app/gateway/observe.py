"""The side observer: what an answer says about itself, read beside the forwarded bytes.

It decides when the first token came, counts tokens, and sees usage, finish and errors. It
never changes a byte. An SSE stream is handed on in whole events (a cut inside an event, or
inside a character, is healed by waiting for the rest), which also makes an honest ending
possible: what the client has is always complete events. Memory is bounded: an event larger
than ``_EVENT_BYTES`` is passed through as it comes.

SSE: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any

import orjson

_EVENT_BYTES = 64 * 1024
_JSON_BYTES = 256 * 1024
_RECENT_BYTES = 8 * 1024
_LAST_EVENTS = 8  # finish of each choice, usage, [DONE], and the empty piece behind the last
_BOM = b"\xef\xbb\xbf"
_COUNTS = re.compile(rb'"(prompt_tokens|completion_tokens)"\s*:\s*(\d+)')


class Observed:
    """What is known of an answer so far.

    ``first_token``: generated content was seen; ``tokens``: the node's own count where it gave
    one, else content events; ``error``: the message of an error object inside the answer;
    ``ended``: the answer said that it is complete.
    """

    __slots__ = ("_events", "ended", "error", "first_token", "output_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self.first_token = False
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.error: str | None = None
        self.ended = False
        self._events = 0

    @property
    def tokens(self) -> int:
        """Output tokens."""
        return self.output_tokens or self._events

    def conclude(self) -> None:
        """Nothing more will come: take what is known as final."""

    def book_usage(self, usage: Any) -> None:
        """Take the node's own counts (OpenAI ``usage`` object)."""
        if isinstance(usage, dict):
            self.prompt_tokens = _count(usage.get("prompt_tokens"))
            self.output_tokens = _count(usage.get("completion_tokens"))


class EventStream(Observed):
    """Observer of ``text/event-stream``."""

    __slots__ = ("_passing", "_recent", "_recent_bytes", "_tail", "committed")

    def __init__(self) -> None:
        super().__init__()
        self._tail = b""
        self._passing = False  # inside an event too large to hold
        self._recent: deque[bytes] = deque()  # the last events, at least _RECENT_BYTES of them
        self._recent_bytes = 0
        self.committed = False  # at least one whole event (or comment) has gone by

    def feed(self, chunk: bytes) -> bytes:
        """Take what a read returned; get the whole events so far, b"" when there are none."""
        data = self._tail + chunk if self._tail else chunk
        cut = len(data) if data.endswith(b"\n\n") else _boundary(data)
        if cut == 0:
            if len(data) <= _EVENT_BYTES and not self._passing:
                self._tail = data
                return b""
            self._passing = self.first_token = self.committed = True
            body = data.rstrip(b"\r\n")  # a line end may be half of the blank line: see it whole
            self._tail = data[len(body) :]
            return body
        ready, self._tail = (data, b"") if cut == len(data) else (data[:cut], data[cut:])
        self._passing = False
        self.committed = True
        self._look(ready)
        return ready

    def rest(self) -> bytes:
        """What is left when the stream has ended properly: an unterminated last event."""
        rest, self._tail = self._tail, b""
        if rest:
            self._look(rest)
        self.conclude()
        return rest

    @property
    def between_events(self) -> bool:
        """Whether the bytes handed on so far end at the end of an event."""
        return not self._passing

    def _look(self, ready: bytes) -> None:
        """Read whole events until the first token; count and remember the later ones."""
        if b"\r" in ready:
            ready = ready.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        while not self.first_token and ready:
            event, _, ready = ready.partition(b"\n\n")
            if self._event(event):
                self.first_token = True
                self._events += 1
        if not ready:
            return
        # A search of every chunk for usage, finish, error and end costs as much as forwarding it,
        # and they stand at the end of a stream: what may hold them is kept and read there.
        self._events += _objects(ready)
        self._recent.append(ready)
        self._recent_bytes += len(ready)
        while self._recent_bytes - len(self._recent[0]) >= _RECENT_BYTES:
            self._recent_bytes -= len(self._recent.popleft())

    def conclude(self) -> None:
        """The stream has ended, well or not: read what its last events say about it."""
        for event in b"".join(self._recent).rsplit(b"\n\n", _LAST_EVENTS)[-_LAST_EVENTS:]:
            if _may_matter(event) and not self._event(event):
                self._events -= _objects(event)  # was counted, and carries no token
        self._recent.clear()

    def _event(self, event: bytes) -> bool:
        """Take what one event says; whether it carries generated content."""
        data = b"\n".join(
            line.partition(b":")[2].strip()
            for line in event.removeprefix(_BOM).split(b"\n")
            if line.startswith(b"data:")
        )
        if data == b"[DONE]":
            self.ended = True
        if not data.startswith(b"{"):
            return False  # a comment, or not ours to judge: the bytes pass
        try:
            fields = orjson.loads(data)
        except orjson.JSONDecodeError:
            return False
        if fields.get("error"):
            self.error = _message(fields["error"])
        if fields.get("usage"):
            self.book_usage(fields["usage"])
        choices = [c for c in fields.get("choices") or () if isinstance(c, dict)]
        self.ended = self.ended or any(choice.get("finish_reason") for choice in choices)
        return any(map(_generated, choices))


def _generated(choice: dict[str, Any]) -> bool:
    """Whether a choice carries content: text, or anything in its delta but the role."""
    delta = choice.get("delta")
    return bool(choice.get("text")) or (
        isinstance(delta, dict) and any(v for k, v in delta.items() if k != "role")
    )


def _may_matter(events: bytes) -> bool:
    """Whether usage, a finish, an error or the end may be in ``events``: a quick look at bytes."""
    return (
        b'"usage":{' in events
        or b'"usage": {' in events
        or b'"finish_reason":"' in events
        or b'"finish_reason": "' in events
        or b"[DONE]" in events
        or b'"error"' in events
    )


def _objects(events: bytes) -> int:
    """How many of ``events`` carry a JSON object, by a quick look: content, after the first."""
    first = events.startswith((b"data: {", b"data:{"))
    return first + events.count(b"\ndata: {") + events.count(b"\ndata:{")


class JsonBody(Observed):
    """Observer of an answer in one piece."""

    __slots__ = ("_parts", "_size")

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> bytes:
        """Take a part; parts beyond the bound are kept only as far as counts may be in them."""
        self._size += len(chunk)
        if self._size > _JSON_BYTES:
            self._parts = [b"".join(self._parts)[-4096:], chunk]
        else:
            self._parts.append(chunk)
        return chunk

    def rest(self) -> bytes:
        """The answer is whole: read its usage. Nothing is held back."""
        self.ended = True
        body = b"".join(self._parts)
        if self._size > _JSON_BYTES:
            self.book_usage({k.decode(): int(v) for k, v in _COUNTS.findall(body[-4096:])})
            return b""
        try:
            answer = orjson.loads(body)
        except orjson.JSONDecodeError:
            return b""
        if isinstance(answer, dict):
            if answer.get("error"):
                self.error = _message(answer["error"])
            self.book_usage(answer.get("usage"))
        return b""


def _boundary(data: bytes) -> int:
    """End of the last blank line in ``data``; 0 when there is none."""
    # A CR at the very end is half of a CRLF: its event is handed on with the LF.
    in_crlf = data.rfind(b"\n\r", 0, len(data) - 1)
    end = max(data.rfind(b"\n\n"), in_crlf, data.rfind(b"\r\r")) + 2
    if end == 1:
        return 0
    return end + 1 if data[end - 1 : end + 1] == b"\r\n" else end


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _message(error: Any) -> str:
    return str(error.get("message", "") if isinstance(error, dict) else error) or "error"
