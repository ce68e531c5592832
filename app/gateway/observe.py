"""The side observer: what an answer says about itself, read beside the forwarded bytes.

It decides when the first token came, counts tokens, and sees usage, finish and errors. It
changes no byte, but for the usage event that the gateway itself asked for. An SSE stream is
handed on in whole events (a cut inside an event, or inside a character, is healed by waiting
for the rest), which also makes an honest ending possible: what the client has is always
complete events. Memory is bounded: an event larger than ``_EVENT_BYTES`` is passed through as
it comes, and known by its two ends.

SSE: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
"""

from __future__ import annotations

import re
import zlib
from typing import Any

from app.gateway.dialect import (
    END,
    ERROR,
    TOKEN,
    choices_of,
    counts_of,
    error_text,
    failure_of,
    is_end,
    is_generated,
    is_usage_event,
    kind_of,
    parsed,
    usages_of,
)

_EVENT_BYTES = 64 * 1024
_JSON_BYTES = 256 * 1024
_END_BYTES = 4 * 1024  # what is kept of either end of something too large to hold
_RECENT_BYTES, _RECENT_EVENTS = 8 * 1024, 4  # of a stream's end, at least
_INFLATED_BYTES = 4 * 1024 * 1024  # a read that inflates to more is not looked at
_BOM = b"\xef\xbb\xbf"

_COUNTS = re.compile(
    rb'"((?:prompt|completion|input|output|cache_read_input|cache_creation_input)_tokens)"'
    rb"\s*:\s*(\d{1,10})\b"
)
_USAGE_OBJECT = re.compile(rb'"usage"\s*:\s*\{')
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"')
_BLANK_LINE = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
_NAME = re.compile(rb'^event:[ \t]*([^\n]+)|^data:[ \t]*\{\s*"type"\s*:\s*"([^"]+)"', re.MULTILINE)
# A field or a value of JSON, an event's name, or the field of llama.cpp; quotes in text are
# escaped, so talk of an error is none of these.
_REAL_ERROR = rb'"error"(?!\s*:\s*(?:null|""|\{\s*\}))'
_MAY_BE_ERROR = re.compile(_REAL_ERROR + rb"|^event:[ \t]*error|^error:[ \t]*\{", re.MULTILINE)
_ERROR_OBJECT = re.compile(rb"^(?:data:)?[ \t]*\{\s*" + _REAL_ERROR, re.MULTILINE)
_DATA_OBJECT = re.compile(rb"^data:([ \t]*)\{", re.MULTILINE)
_LINE_END = re.compile(rb"\r\n?")


class Observed:
    """What is known of an answer so far.

    ``first_token``: generated content was seen; ``tokens``: the node's own count where it gave
    one, else content events; ``error``: the message of an error object inside the answer;
    ``ended``: the answer said that it is over, well or with an error; ``over``: it said so with
    its last word, after which nothing of worth can come.
    """

    __slots__ = ("_events", "ended", "error", "first_token", "output_tokens", "over",
                 "prompt_tokens")  # fmt: skip

    def __init__(self) -> None:
        self.first_token = False
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.error: str | None = None
        self.ended = False
        self.over = False
        self._events = 0

    @property
    def tokens(self) -> int:
        """Output tokens."""
        return self.output_tokens or self._events

    def conclude(self) -> None:
        """Nothing more will come: take what is known as final."""

    def book_usage(self, usage: Any) -> None:
        """Take the node's own counts from a ``usage`` object; they only grow."""
        prompt, output = counts_of(usage)
        self.prompt_tokens = max(self.prompt_tokens, prompt)
        self.output_tokens = max(self.output_tokens, output)

    def _book_counts(self, part: bytes) -> None:
        """Take the counts of a usage object somewhere in ``part`` of something too large."""
        at = part.rfind(b'"usage"')
        if at >= 0:
            self.book_usage({k.decode(): int(v) for k, v in _COUNTS.findall(part, at)})

    def _fail(self, message: str) -> None:
        """The answer says that it failed. The first word of it counts."""
        self.error = self.error or message
        self.ended = self.over = True


class EventStream(Observed):
    """Observer of ``text/event-stream``.

    ``hide_usage``: the gateway asked for the usage event, not the client; it is booked and
    left out of what is handed on.
    """

    __slots__ = ("_content", "_head", "_hide_usage", "_later", "_later_bytes", "_passing",
                 "_recent", "_tail", "_trail", "committed")  # fmt: skip

    def __init__(self, *, hide_usage: bool = False) -> None:
        super().__init__()
        self._hide_usage = hide_usage
        self._tail = b""
        self._content = b"\ndata: {"  # how this node begins an event of content
        self._passing = False  # inside an event too large to hold
        self._head = self._trail = b""  # its two ends
        self._later: list[bytes] = []  # events after the first token, not looked at yet
        self._later_bytes = 0
        self._recent = b""  # the last events that were
        self.committed = False  # at least one whole event (or comment) has gone by

    def feed(self, chunk: bytes) -> bytes:
        """Take what a read returned; get the whole events so far, b"" when there are none."""
        data = self._tail + chunk if self._tail else chunk
        cut = len(data) if data.endswith(b"\n\n") else _boundary(data)
        if cut == 0:
            if self._passing:
                return self._pass(data)
            self._tail = data.lstrip(b"\r\n")  # what stands before an event belongs to none
            before = data[: len(data) - len(self._tail)]
            return before + self._pass(self._tail) if len(self._tail) > _EVENT_BYTES else before
        ready, self._tail = (data, b"") if cut == len(data) else (data[:cut], data[cut:])
        self.committed = True
        begun = 0
        if self._passing or len(ready) > _EVENT_BYTES:
            begun = self._look_at_large(ready)
        else:
            self._look(ready)
        if self._hide_usage:
            ready = self._without_usage(ready, begun)
        return ready + self._pass(self._tail) if len(self._tail) > _EVENT_BYTES else ready

    def rest(self) -> bytes:
        """What is left when the stream has ended properly: an unterminated last event."""
        rest, self._tail = self._tail, b""
        if self._passing:
            self._end_large(rest)
        elif rest:
            self._look(rest)
        self.conclude()
        if not self.over and _is_cut(rest):
            self.ended = False
        return self._without_usage(rest) if self._hide_usage else rest

    @property
    def between_events(self) -> bool:
        """Whether the bytes handed on so far end at the end of an event."""
        return not self._passing

    @property
    def tokens(self) -> int:
        """Output tokens."""
        self._read_later()
        return super().tokens

    def conclude(self) -> None:
        """The stream has ended, well or not: read backwards what its last events say about it."""
        self._read_later()
        recent, self._recent = self._recent, b""
        for event in reversed(recent.split(b"\n\n")):
            if self._event(event):
                break  # content: what stands before it was no last word
            self._events -= _count(event, self._content)  # was counted, and carries no token

    # Whole events, as many as a read brought

    def _look(self, ready: bytes) -> None:
        """Read events until the first token; the later ones are put by, to be read many at once.

        A search of every read for usage, finish, errors and end costs as much as forwarding it.
        """
        if not self.first_token:
            ready = self._until_first_token(ready)
            if not ready:
                return
        self._later.append(ready)
        self._later_bytes += len(ready)
        if self._later_bytes >= _RECENT_BYTES:
            self._read_later()

    def _until_first_token(self, ready: bytes) -> bytes:
        """Read each event up to the first one of content; what is left after it."""
        ready = _with_lf(ready)
        while ready:
            event, _, ready = ready.partition(b"\n\n")
            if self._event(event):
                self.first_token = True
                self._events += 1
                begin = _DATA_OBJECT.search(event)
                self._content = b"\ndata:" + (begin[1] if begin else b" ") + b"{"
                break
        return ready

    def _read_later(self) -> None:
        """Count the events put by, look for errors, keep the last: an end may stand there."""
        if not self._later_bytes:
            return
        events = _with_lf(b"".join(self._later))
        self._later.clear()
        self._later_bytes = 0
        self._events += _count(events, self._content)
        if b"error" in events and _MAY_BE_ERROR.search(events):
            for event in events.split(b"\n\n"):
                if _MAY_BE_ERROR.search(event):
                    self._event(event)
        recent = self._recent + events
        start = recent.rfind(b"\n\n", 0, max(0, len(recent) - _RECENT_BYTES))
        last = len(recent)
        for _ in range(_RECENT_EVENTS + 1):
            last = recent.rfind(b"\n\n", 0, max(0, last))
        start = min(start, last)
        self._recent = recent[start + 2 :] if start >= 0 else recent

    def _event(self, event: bytes) -> bool:
        """Take what one event says; whether it carries generated content."""
        name, data = _read(event)
        if data == b"[DONE]":
            self.ended = self.over = True
        fields = parsed(data) if data.startswith(b"{") else None
        if not isinstance(fields, dict):  # a comment, or not ours to judge: the bytes pass
            if name == "error":
                self._fail(error_text(data.decode(errors="replace")))
            return False
        kind = kind_of(name if name == "error" else fields.get("type", name))
        for usage in usages_of(fields):
            self.book_usage(usage)
        choices = choices_of(fields)
        failure = failure_of(fields, choices, kind)
        if failure is not None:
            self._fail(failure)
            return False
        self.over = self.over or kind == END
        self.ended = self.ended or is_end(choices, kind)
        return is_generated(fields, choices, kind)

    def _without_usage(self, ready: bytes, start: int = 0) -> bytes:
        """Whole events from ``start`` on, without the one that holds usage and no choice."""
        if b'"usage"' not in ready or not _USAGE_OBJECT.search(ready, start):
            return ready
        kept = [ready[:start]]
        for end in [*(blank.end() for blank in _BLANK_LINE.finditer(ready, start)), len(ready)]:
            event = ready[start:end].lstrip(b"\r\n")
            kept.append(ready[start : end - len(event)])
            large = len(event) > _EVENT_BYTES + 1  # in other pieces it would not have been held
            if large or not is_usage_event(_read(_with_lf(event))[1]):
                kept.append(event)
            start = end
        return b"".join(kept)

    # Events too large to hold

    def _pass(self, data: bytes) -> bytes:
        """Hand on a part of an event that is too large to hold."""
        body = data.rstrip(b"\r\n")  # a line end may be half of the blank line: see it whole
        self._tail = data[len(body) :]
        if not self._passing:
            self._passing = self.committed = True
            self._head, self._trail = body[:_END_BYTES], b""
            self.first_token = self.first_token or _kind_of_large(self._head)[0] == TOKEN
        self._trail = (self._trail + body)[-_END_BYTES:]
        return body

    def _end_large(self, data: bytes) -> None:
        """The last part of an event too large to hold: judge it by its two ends."""
        head, trail = self._head, (self._trail + data)[-_END_BYTES:]
        self._passing, self._head, self._trail = False, b"", b""
        kind, name = _kind_of_large(head)
        self._book_counts(trail)
        if kind == ERROR:
            self._fail(f"a large {name or 'error'} event")
            return
        self.over = self.over or kind == END
        self.ended = self.ended or kind == END or bool(_FINISH.search(trail))
        if kind == TOKEN:
            self.first_token = True
            self._events += 1

    def _look_at_large(self, ready: bytes) -> int:
        """Whole events, of which some may be too large, and the first the end of one that was.

        Returns the size of that end.
        """
        start = begun = 0
        if self._passing:
            start = begun = _first_boundary(ready, 0)
            self._end_large(ready[:start])
        while True:
            start = len(ready) - len(ready[start:].lstrip(b"\r\n"))
            if len(ready) - start <= _EVENT_BYTES + 1:
                break
            small = _boundary(ready[start : start + _EVENT_BYTES + 1])
            if small:
                self._look(ready[start : start + small])
                start += small
            else:
                end = _first_boundary(ready, start + _EVENT_BYTES - 1)
                self._head = ready[start : start + _END_BYTES]
                self._end_large(ready[start:end])
                start = end
        if start < len(ready):
            self._look(ready[start:])
        return begun


class JsonBody(Observed):
    """Observer of an answer in one piece."""

    __slots__ = ("_head", "_json", "_parts", "_size")

    def __init__(self, *, json: bool = True) -> None:
        super().__init__()
        self._json = json
        self._parts: list[bytes] = []
        self._size = 0
        self._head = b""  # of a body that is too large to hold

    def feed(self, chunk: bytes) -> bytes:
        """Take a part; of a large body the two ends are kept, where its counts may stand."""
        self._size += len(chunk)
        self._parts.append(chunk)
        if self._size > _JSON_BYTES:
            held = b"".join(self._parts)
            self._head = self._head or held[:_END_BYTES]
            self._parts = [held[-_END_BYTES:]]
        return chunk

    def rest(self) -> bytes:
        """The answer is whole: read its usage. Nothing is held back."""
        body = b"".join(self._parts)
        if self._head:
            self._judge_ends(self._head, body)
            return b""
        fields = parsed(body)
        # JSON that stops in the middle has been cut; what is no JSON is not ours to judge.
        self.ended = fields is not None or not self._begins_like_json(body)
        if isinstance(fields, dict):
            self.book_usage(fields.get("usage"))
            failure = failure_of(fields, choices_of(fields), kind_of(fields.get("type")))
            if failure is not None:
                self._fail(failure)
        return b""

    def _judge_ends(self, head: bytes, trail: bytes) -> None:
        """The two ends of a body that is too large to hold."""
        self.ended = trail.rstrip().endswith((b"}", b"]")) or not self._begins_like_json(head)
        self._book_counts(head)
        self._book_counts(trail)
        if _ERROR_OBJECT.match(head.lstrip()):
            self._fail("a large error")

    def _begins_like_json(self, body: bytes) -> bool:
        return self._json and body.lstrip().startswith((b"{", b"["))


class _Inflate:
    """Plain bytes of a compressed answer, to look at; ``None`` where that cannot be."""

    __slots__ = ("_inflater",)

    def __init__(self, encoding: bytes) -> None:
        known = encoding.strip().lower() in {b"gzip", b"x-gzip", b"deflate"}
        self._inflater = zlib.decompressobj(zlib.MAX_WBITS | 32) if known else None

    def __call__(self, chunk: bytes) -> bytes | None:
        if self._inflater is None:
            return None
        try:
            plain = self._inflater.decompress(chunk, _INFLATED_BYTES)
        except zlib.error:
            plain = None
        if plain is None or self._inflater.unconsumed_tail:
            self._inflater = None
        return plain


class CodedEvents(EventStream):
    """Observer of an event stream that the node has compressed, although nobody asked it to.

    It passes as it comes, each read at once, and is looked at beside. Nothing can be added to
    it or taken out.
    """

    __slots__ = ("_inflate",)

    def __init__(self, encoding: bytes) -> None:
        super().__init__()
        self._inflate = _Inflate(encoding)

    def feed(self, chunk: bytes) -> bytes:
        """See ``EventStream``; all of ``chunk`` comes back."""
        plain = self._inflate(chunk)
        if plain is None:
            self.committed = self.ended = True  # it cannot be asked
        else:
            super().feed(plain)
        return chunk

    def rest(self) -> bytes:
        """Nothing is held back."""
        super().rest()
        return b""

    @property
    def between_events(self) -> bool:
        """Nobody could add an event here."""
        return False


class CodedBody(JsonBody):
    """Observer of a compressed answer in one piece."""

    __slots__ = ("_inflate",)

    def __init__(self, encoding: bytes, *, json: bool = True) -> None:
        super().__init__(json=json)
        self._inflate = _Inflate(encoding)

    def feed(self, chunk: bytes) -> bytes:
        """See ``JsonBody``."""
        super().feed(self._inflate(chunk) or b"")
        return chunk


def observer(
    encoding: bytes = b"", *, events: bool = False, json: bool = True, hide_usage: bool = False
) -> EventStream | JsonBody:
    """The observer of an answer: an event stream or one piece; ``encoding`` is its content's.

    ``json``: what begins like JSON and does not end like it has been cut.
    """
    if encoding and encoding.strip().lower() != b"identity":
        return CodedEvents(encoding) if events else CodedBody(encoding, json=json)
    return EventStream(hide_usage=hide_usage) if events else JsonBody(json=json)


# Reading events


def _read(event: bytes) -> tuple[str, bytes]:
    """Name and data of an event whose lines end in LF; ``error: …`` is llama.cpp's own field."""
    name, data = "", []
    for line in event.lstrip(b"\n").removeprefix(_BOM).split(b"\n"):
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.strip().decode("latin-1")
        elif field == b"error" and value.lstrip().startswith(b"{"):
            name, data = "error", [value]
    return name, b"\n".join(data).strip()


def _is_cut(rest: bytes) -> bool:
    """Whether an unterminated last event has broken off in its middle."""
    return bool(rest.strip()) and parsed(_read(_with_lf(rest))[1]) is None


def _kind_of_large(head: bytes) -> tuple[str, str]:
    """What a large event that begins so is, and its name: content unless it says otherwise."""
    head = _with_lf(head)
    named = _NAME.search(head)
    name = (named[1] or named[2]).strip().decode("latin-1") if named else ""
    if _ERROR_OBJECT.search(head):
        return ERROR, name
    content = not name or b'"choices"' in head
    return kind_of(name) or (TOKEN if content else ""), name


def _with_lf(events: bytes) -> bytes:
    """``events`` with line ends of LF."""
    return _LINE_END.sub(b"\n", events) if b"\r" in events else events


def _count(events: bytes, content: bytes) -> int:
    """How many of ``events`` begin like ``content``, by a quick look."""
    return events.startswith(content[1:]) + events.count(content)


def _boundary(data: bytes) -> int:
    """End of the last blank line in ``data``; 0 when there is none."""
    # A CR at the very end is half of a CRLF: its event is handed on with the LF.
    in_crlf = data.rfind(b"\n\r", 0, len(data) - 1)
    end = max(data.rfind(b"\n\n"), in_crlf, data.rfind(b"\r\r")) + 2
    if end == 1:
        return 0
    return end + 1 if data[end - 1 : end + 1] == b"\r\n" else end


def _first_boundary(data: bytes, start: int) -> int:
    """End of the first blank line in ``data`` from ``start`` on, where there is one."""
    found = (data.find(pair, start) for pair in (b"\n\n", b"\n\r", b"\r\r"))
    end = min(at for at in found if at >= 0) + 2
    return end + 1 if data[end - 1 : end + 1] == b"\r\n" else end
