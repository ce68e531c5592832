"""H2: the side observer accepts all legal SSE, and passes it unchanged."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest

from tests.cases.bench import Bench, Booked, cut_every, in_pieces, renewed, running_bench
from tests.support.rawclient import ask, chat
from tests.support.rawnode import STREAM_HEAD, content_event, event, events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

USAGE = {"prompt_tokens": 31, "completion_tokens": 17, "total_tokens": 48}
USAGE_EVENT = event({"id": "chatcmpl-1", "model": "m", "choices": [], "usage": USAGE})
CONTENT = 5
*_BODY, FINISH, DONE = events(CONTENT)


def each(change: Callable[[int, bytes], bytes]) -> Callable[[list[bytes]], list[bytes]]:
    """A style that changes each event by itself."""
    return lambda parts: [change(i, part) for i, part in enumerate(parts)]


def _lines(*before: str) -> Callable[[list[bytes]], list[bytes]]:
    """A style with more lines in front of each event's data; ``#`` is the event's number."""
    return each(
        lambda i, part: "".join(f"{line.replace('#', str(i))}\n" for line in before).encode() + part
    )


def _two_lines(_: int, part: bytes) -> bytes:
    head, colon, tail = part.partition(b'"choices":')
    return head + colon + b"\ndata: " + tail if colon else part


STYLES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "as usual": lambda parts: parts,
    "no space after the colon": each(lambda _, p: p.replace(b"data: ", b"data:")),
    "tab after the colon": each(lambda _, p: p.replace(b"data: ", b"data:\t")),
    "three spaces": each(lambda _, p: p.replace(b"data: ", b"data:   ")),
    "CRLF": each(lambda _, p: p.replace(b"\n", b"\r\n")),
    "CRLF, no space": each(lambda _, p: p.replace(b"data: ", b"data:").replace(b"\n", b"\r\n")),
    "lone CR": each(lambda _, p: p.replace(b"\n", b"\r")),
    "mixed line ends": each(lambda i, p: p.replace(b"\n", (b"\n", b"\r\n", b"\r")[i % 3])),
    "LF, then CRLF": each(lambda _, p: p.replace(b"\n\n", b"\n\r\n")),
    "event, id and retry": _lines("event: message", "id: #", "retry: 3000"),
    "event, id and retry, CRLF": lambda parts: [
        p.replace(b"\n", b"\r\n") for p in _lines("event:message", "id:#", "retry:1")(parts)
    ],
    "fields by name only": _lines("id", "retry", "event"),
    "data by name only": _lines("data"),
    "data by name only, CRLF": lambda parts: [
        p.replace(b"\n", b"\r\n") for p in _lines("data")(parts)
    ],
    "unknown fields": _lines("x-vendor: {}", "foo", "datas: {}", "Data: {}", " data: {}", "error"),
    "fields after the data": each(lambda i, p: p[:-1] + b"id: %d\nretry: 5\n\n" % i),
    "comments between events": each(lambda _, p: b": keep-alive\n\n:\n\n" + p),
    "comments inside events": _lines(": {}", ":", ":data: {}"),
    "comment of 30 kB": _lines(":" + "x" * 30_000),
    "two data lines": each(_two_lines),
    "two data lines, no space, CRLF": each(
        lambda i, p: _two_lines(i, p).replace(b"data: ", b"data:").replace(b"\n", b"\r\n")
    ),
    "leading BOM": lambda parts: [b"\xef\xbb\xbf" + parts[0], *parts[1:]],
    "leading BOM, no space": lambda parts: [
        b"\xef\xbb\xbf" + parts[0].replace(b"data: ", b"data:"),
        *parts[1:],
    ],
    "leading blank lines": lambda parts: [b"\n\n\n" + parts[0], *parts[1:]],
    "many blank lines": each(lambda _, p: p + b"\n\n"),
    "spaces inside the JSON": each(lambda _, p: p.replace(b'":', b'" : ').replace(b",", b" , ")),
    "no blank line at the end": lambda parts: [*parts[:-1], parts[-1].rstrip()],
}


@pytest.fixture(scope="module")
def started() -> Iterator[Bench]:
    with running_bench() as bench:
        yield bench


@pytest.fixture
def bench(started: Bench) -> Bench:
    return renewed(started)


def pieces(raw: bytes, way: str) -> list[bytes]:
    """``raw`` as the node writes it: in one piece, in single bytes, in random pieces."""
    if way != "random":
        return cut_every(raw, len(raw) if way == "whole" else 1)
    draw = random.Random(2)
    edges = sorted({0, len(raw), *draw.choices(range(len(raw)), k=30)})
    return [raw[a:b] for a, b in itertools.pairwise(edges)]


def replay(bench: Bench, raw: bytes, way: str, *, sized: bool) -> Booked:
    """Stream ``raw`` through the replica; what it booked. The client must get the same bytes."""

    bench.node.script = in_pieces(STREAM_HEAD, pieces(raw, way), sized=sized)
    before = bench.booked()
    client = ask(bench.gw.port, chat(model="m1", stream_options={"include_usage": True}))
    assert client.status == 200
    assert client.complete
    assert client.body == raw
    bench.wait_unloaded()
    return bench.booked() - before


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("way", ["whole", "random", "bytes"])
def test_bytes_pass_and_usage_and_the_first_token_are_recognised_in(
    bench: Bench, style: str, way: str
) -> None:
    if way == "bytes" and "kB" in style:
        way = "random"
    raw = b"".join(STYLES[style]([*_BODY, FINISH, USAGE_EVENT, DONE]))
    assert replay(bench, raw, way, sized=True) == Booked(prompt=31, output=17, samples=1, ok=1)
    # The node's record has it too, and nothing counts as a failure.
    assert bench.streak() == 0


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "end", [[FINISH], [DONE], [FINISH, DONE]], ids=["finish_reason", "[DONE]", "both"]
)
def test_the_end_is_recognised_where_only_the_close_ends_the_body_in(
    bench: Bench, style: str, end: list[bytes]
) -> None:
    # An end that is not recognised would be taken for a cut, and an error event added.
    raw = b"".join(STYLES[style]([*_BODY, *end]))
    assert replay(bench, raw, "random", sized=False) == Booked(output=CONTENT, samples=1, ok=1)


@pytest.mark.parametrize("style", STYLES)
def test_a_missing_end_and_an_error_are_recognised_in(bench: Bench, style: str) -> None:
    error = event({"error": {"message": "CUDA out of memory", "code": 500}})
    raw = b"".join(STYLES[style]([*_BODY, error]))
    booked = replay(bench, raw, "whole", sized=True)
    assert (booked.ok, booked.failed, booked.samples) == (0, 1, 1)
    # Without a last word the close may be the node's death: the client is told.
    raw = b"".join(STYLES[style]([*_BODY, content_event("x")]))
    bench.node.script = in_pieces(STREAM_HEAD, [raw], sized=False)
    client = ask(bench.gw.port, chat(model="m1"))
    # Of an event without its blank line nothing is known: it is not handed on.
    assert client.body.startswith(raw if "no blank" not in style else raw[:-200])
    assert client.body.count(b'data: {"error":') == 1


def test_a_bom_does_not_hide_the_event_behind_it(bench: Bench) -> None:
    bom = b"\xef\xbb\xbf"
    raw = bom + content_event("a") + DONE
    assert replay(bench, raw, "bytes", sized=True) == Booked(output=1, samples=1, ok=1)
    raw = bom + DONE
    assert replay(bench, raw, "whole", sized=False) == Booked(ok=1)


def test_an_event_of_another_kind_is_no_token_and_no_end(bench: Bench) -> None:
    others = [
        b"event: ping\ndata: {}\n\n",
        b"data: hello\n\n",
        b"data\n\n",
        b"data:\n\n",
        b"event: done\n\n",
        b"id: 4\n\n",
        b"retry: 1\n\n",
        b"data: [1, 2]\n\n",
        b'data: "finish_reason"\n\n',
        b": [DONE]\n\n",
    ]
    raw = b"".join([*others, *_BODY, *others, FINISH, DONE])
    assert replay(bench, raw, "random", sized=True).samples == 1
    raw = b"".join([*others, _BODY[0], FINISH, DONE])  # the role event alone
    assert replay(bench, raw, "random", sized=True) == Booked(ok=1)
