"""The side observer: however the bytes are cut, it hands on the same and has seen the same."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.gateway.observe import EventStream, JsonBody, Observed

# Recorded streams, in the shapes that engines send


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> str:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return json.dumps(
        {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": choices, **more},
        ensure_ascii=False,
        separators=(",", ":"),
    )


def completion(text: str, finish: str | None = None) -> str:
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def tool(arguments: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}


def stream(*events: str, end: str = "\n", space: str = " ") -> bytes:
    """One event of each text; a text with lines becomes one event of several lines."""
    lines = [
        line if line.startswith((":", "event", "id", "retry")) else f"data:{space}{line}"
        for event in events
        for line in (*event.split("\n"), "")
    ]
    return "".join(line.removesuffix(f"data:{space}") + end for line in lines).encode()


ROLE = chunk({"role": "assistant", "content": ""})
USAGE = {"prompt_tokens": 11, "completion_tokens": 42, "total_tokens": 53}
ANSWER = (
    ROLE,
    *(
        chunk({"content": text})
        for text in ("春眠", "不觉晓", " 😀👩‍👩‍👧", " 𐍈", " é\u0301", ' "x"')
    ),
    *(chunk(tool(part)) for part in ('{"city": "Z\\"ü', 'rich\\\\", "n": 1}')),
    chunk({}, "tool_calls"),
)
PLAIN = (ROLE, *(chunk({"content": f"t{i} "}) for i in range(5)), chunk({}, "stop"))


@dataclass(frozen=True)
class Recorded:
    """A stream and what is to be seen in it."""

    raw: bytes
    tokens: int
    first_token: bool = True
    ended: bool = True
    prompt: int = 0
    error: str | None = None


RECORDED = {
    "usage and done": Recorded(stream(*ANSWER, chunk(None, usage=USAGE), "[DONE]"), 42, prompt=11),
    "CRLF": Recorded(
        stream(*ANSWER, chunk(None, usage=USAGE), "[DONE]", end="\r\n"), 42, prompt=11
    ),
    "CR": Recorded(stream(*ANSWER, chunk(None, usage=USAGE), "[DONE]", end="\r"), 42, prompt=11),
    "no space": Recorded(stream(*ANSWER, chunk(None, usage=USAGE), space=""), 42, prompt=11),
    "no usage": Recorded(stream(*ANSWER, "[DONE]"), 8),
    "no usage, CRLF": Recorded(stream(*PLAIN, "[DONE]", end="\r\n"), 5),
    "no usage, CR": Recorded(stream(*PLAIN, "[DONE]", end="\r"), 5),
    "no usage, no space": Recorded(stream(*PLAIN, "[DONE]", space=""), 5),
    "usage null until the end": Recorded(
        stream(
            chunk({"role": "assistant", "content": ""}, usage=None),
            *(chunk({"content": "a"}, usage=None) for _ in range(3)),
            chunk({}, "stop", usage=None),
            chunk(None, usage=USAGE),
            "[DONE]",
        ),
        42,
        prompt=11,
    ),
    "usage with every event": Recorded(
        stream(*(chunk({"content": "a"}, usage={**USAGE, "completion_tokens": i}) for i in (1, 2)))
        + stream(chunk({}, "stop", usage={**USAGE, "completion_tokens": 3})),
        3,
        prompt=11,
    ),
    "comments": Recorded(
        stream(": ping", ": data: {}", ROLE, ": ping", *PLAIN[1:3], ": ping", *PLAIN[3:], "[DONE]"),
        5,
    ),
    "event, id and retry": Recorded(
        stream(
            f"event: message\nid: 1\nretry: 10\n{ROLE}",
            *(f"id: {i}\n{event}" for i, event in enumerate(PLAIN[1:])),
            "event: end\n[DONE]",
        ),
        5,
    ),
    "two lines of data": Recorded(
        stream(*(event.replace('"choices":', '"choices":\n') for event in PLAIN), "[DONE]"), 5
    ),
    "BOM": Recorded(b"\xef\xbb\xbf" + stream(*PLAIN, "[DONE]"), 5),
    "BOM before a token": Recorded(b"\xef\xbb\xbf" + stream(*PLAIN[1:], "[DONE]"), 5),
    "text that says data:": Recorded(
        stream(*(chunk({"content": "data: x\ndata: y"}) for _ in range(3)), chunk({}, "stop")), 3
    ),
    "no blank line at the end": Recorded(stream(*PLAIN, "[DONE]").rstrip(b"\n"), 5),
    "completions": Recorded(
        stream(*(completion(t) for t in ("", "春", "晓")), completion("", "length"), "[DONE]"), 2
    ),
    "spaces as json.dumps writes them": Recorded(
        stream(
            *(json.dumps(json.loads(event)) for event in PLAIN),
            json.dumps({"choices": [], "usage": USAGE}),
            "[DONE]",
        ),
        42,
        prompt=11,
    ),
    "error event": Recorded(
        stream(ROLE, *PLAIN[1:3], '{"error":{"message":"KV 满","type":"x"}}'),
        2,
        ended=False,
        error="KV 满",
    ),
    "error first": Recorded(
        stream('{"error": {"message": "no", "code": 500}}'),
        0,
        first_token=False,
        ended=False,
        error="no",
    ),
    "error null": Recorded(
        stream(*(chunk({"content": "a"}, error=None) for _ in range(3)), chunk({}, "stop")), 3
    ),
    "talk of errors": Recorded(
        stream(
            chunk({"content": 'an "error" event: {"error": {"message": "x"}}'}),
            chunk({"content": '"error":'}),
            chunk({}, "stop"),
            "[DONE]",
        ),
        2,
    ),
    "nothing generated": Recorded(
        stream(": ping", ROLE, chunk({}, "stop"), "[DONE]"), 0, first_token=False
    ),
    "only done": Recorded(stream("[DONE]"), 0, first_token=False),
    "not JSON": Recorded(
        stream("hello", "[1]", '"x"', "{bad", "5"), 0, first_token=False, ended=False
    ),
}


def observed(pieces: list[bytes]) -> tuple[bytes, EventStream]:
    seen = EventStream()
    out = b"".join([*(seen.feed(piece) for piece in pieces), seen.rest()])
    return out, seen


def check(recorded: Recorded, pieces: list[bytes]) -> None:
    assert b"".join(pieces) == recorded.raw
    out, seen = observed(pieces)
    assert out == recorded.raw
    assert seen.first_token is recorded.first_token
    assert seen.tokens == recorded.tokens
    assert seen.prompt_tokens == recorded.prompt
    assert seen.ended is recorded.ended
    assert seen.error == recorded.error


def cut(raw: bytes, at: set[int]) -> list[bytes]:
    edges = [0, *sorted(at), len(raw)]
    return [raw[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("name", RECORDED)
def test_one_piece_single_bytes_and_every_single_cut_are_the_same(name: str) -> None:
    recorded = RECORDED[name]
    raw = recorded.raw
    check(recorded, [raw])
    check(recorded, [raw[i : i + 1] for i in range(len(raw))])
    for i in range(1, len(raw)):
        check(recorded, [raw[:i], raw[i:]])


@given(st.data(), st.sampled_from(sorted(RECORDED)))
def test_any_split_is_the_same(data: st.DataObject, name: str) -> None:
    recorded = RECORDED[name]
    at = data.draw(st.sets(st.integers(0, len(recorded.raw)), max_size=40))
    check(recorded, cut(recorded.raw, at))  # pieces may be empty


@given(st.lists(st.sampled_from([b"\r", b"\n", b"data: {}", b":x", b"a"]), max_size=40), st.data())
def test_any_mixture_of_line_ends_passes_unchanged(parts: list[bytes], data: st.DataObject) -> None:
    raw = b"".join(parts)
    at = data.draw(st.sets(st.integers(0, len(raw)), max_size=10))
    out, _ = observed(cut(raw, at))
    assert out == raw


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_whole_events_are_handed_on_at_once_and_half_ones_held(end: str) -> None:
    raw = stream(*PLAIN, end=end)
    seen, given_on, fed = EventStream(), b"", b""
    for i in range(len(raw)):
        fed += raw[i : i + 1]
        given_on += seen.feed(raw[i : i + 1])
        blank = (end * 2).encode()
        whole = fed.rfind(blank) + len(blank) if blank in fed else 0
        assert len(given_on) == whole
        assert seen.between_events


# What a first token is


@pytest.mark.parametrize(
    "event",
    [
        ROLE,
        chunk({"role": "assistant"}),
        chunk({"role": "assistant", "content": None}),
        chunk({"content": "", "tool_calls": [], "reasoning_content": ""}),
        chunk({}),
        chunk({}, "stop"),
        chunk(None, usage=USAGE),
        completion(""),
        ": keep-alive",
        "event: ping",
        '{"choices":null}',
        '{"choices":[]}',
        '{"choices":[null]}',
        "{}",
        "[DONE]",
    ],
)
def test_what_is_no_generated_content_is_no_first_token(event: str) -> None:
    out, seen = observed([stream(event)])
    assert out == stream(event)
    assert not seen.first_token
    assert seen.committed or not event.startswith("{")


@pytest.mark.parametrize(
    "event",
    [
        chunk({"content": "a"}),
        chunk({"role": "assistant", "content": " "}),
        chunk({"reasoning_content": "hm"}),
        chunk({"content": "", "reasoning": "hm"}),
        chunk(tool("{")),
        chunk({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f"}}]}),
        chunk({"refusal": "no"}),
        completion("a"),
        completion("\n"),
    ],
)
def test_generated_content_is_the_first_token(event: str) -> None:
    seen = EventStream()
    seen.feed(stream(ROLE))
    seen.feed(b": comment\n\n")
    assert not seen.first_token
    raw = stream(event)
    flags = []
    for i in range(len(raw)):
        seen.feed(raw[i : i + 1])
        flags.append(seen.first_token)
    assert flags == [False] * (len(raw) - 1) + [True]  # a half event is none
    assert seen.tokens == 1


# Errors


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ('{"error":{"message":"out of memory","code":500}}', "out of memory"),
        ('{"error":"boom"}', "boom"),
        ('{"error":{"code":500}}', "error"),
        ('{"error": {"message": ""}}', "error"),
        ('{"choices":[],"error":{"message":"late"}}', "late"),
    ],
)
@pytest.mark.parametrize("before", [0, 1, 4])
def test_an_error_event_is_seen_at_any_time(data: str, message: str, before: int) -> None:
    _, seen = observed([stream(event) for event in (*PLAIN[:before], data)])
    assert seen.error == message
    assert not seen.ended


@pytest.mark.parametrize(
    "data",
    [
        '{"error":null,"choices":[]}',
        '{"error":{},"choices":[]}',
        '{"error":"","choices":[]}',
        chunk({"content": "error"}),
        chunk({"content": '{"error":{"message":"quoted"}}'}),
        chunk({"error": "a field of the delta"}),
    ],
)
@pytest.mark.parametrize("before", [0, 4])
def test_what_only_talks_of_an_error_is_none(data: str, before: int) -> None:
    _, seen = observed([stream(event) for event in (*PLAIN[:before], data)])
    assert seen.error is None


# Bounds


def test_a_line_of_8_mib_passes_in_bounded_memory() -> None:
    read = b"x" * 65_536
    seen, passed = EventStream(), 0
    tracemalloc.start()
    try:
        passed += len(seen.feed(b'data: {"choices":[{"delta":{"content":"'))
        for _ in range(128):
            passed += len(seen.feed(read))
            assert not seen.between_events
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert passed == 39 + 128 * len(read)  # nothing is held back
    assert peak < 1024 * 1024
    assert seen.first_token
    end = seen.feed(b'"}}]}\n\n')
    assert end == b'"}}]}\n\n'
    assert seen.between_events


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("size", [65_535, 65_536, 100_000, 300_000])
def test_what_follows_a_very_large_event_is_still_seen(size: int, end: str) -> None:
    large = stream(chunk({"content": "x" * size}), end=end)
    rest = stream(chunk({}, "stop", usage=USAGE), end=end)
    raw = large + rest
    at = len(large)
    cuts = [
        set[int](),
        *({at + i} for i in range(-4, 8)),
        *({at + i, at + 40} for i in range(-4, 5)),
    ]
    for more in cuts:
        out, seen = observed(cut(raw, {30_000, 66_000, *more} & set(range(len(raw)))))
        assert out == raw
        assert (seen.first_token, seen.ended, seen.error) == (True, True, None)
        assert (seen.tokens, seen.prompt_tokens) == (42, 11), more
        assert seen.between_events


# Answers in one piece


def answer(padding: int = 0, **more: Any) -> bytes:
    message = {"role": "assistant", "content": "春" * padding}
    return json.dumps({"choices": [{"message": message}], "usage": USAGE, **more}).encode()


def whole(raw: bytes, size: int) -> JsonBody:
    seen = JsonBody()
    for i in range(0, len(raw), size):
        assert seen.feed(raw[i : i + size]) == raw[i : i + size]
    assert seen.rest() == b""
    return seen


@pytest.mark.parametrize("size", [1, 7, 4096, 1 << 30])
def test_usage_of_a_small_body(size: int) -> None:
    seen = whole(answer(10), size)
    assert (seen.tokens, seen.prompt_tokens, seen.error, seen.ended) == (42, 11, None, True)
    assert not seen.first_token


@pytest.mark.parametrize("size", [1000, 4096, 262_144, 1 << 30])
@pytest.mark.parametrize("padding", [43_000, 44_000, 200_000])
def test_usage_at_the_end_of_a_large_body(padding: int, size: int) -> None:
    raw = answer(padding)
    seen = whole(raw, size)
    assert (seen.tokens, seen.prompt_tokens, seen.error, seen.ended) == (42, 11, None, True)


def test_a_large_body_is_not_kept() -> None:
    seen = JsonBody()
    tracemalloc.start()
    try:
        for _ in range(128):
            seen.feed(b"x" * 65_536)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1024 * 1024


@pytest.mark.parametrize(
    "usage",
    [
        None,
        {},
        [],
        "42",
        {"completion_tokens": None},
        {"completion_tokens": -1},
        {"total_tokens": 3},
    ],
)
def test_odd_usage_counts_nothing(usage: Any) -> None:
    for seen in (
        whole(answer(usage=usage), 100),
        observed([stream(ROLE, chunk(None, usage=usage))])[1],
    ):
        assert (seen.tokens, seen.prompt_tokens) == (0, 0)


@pytest.mark.parametrize("raw", [b"", b"{bad", b"[1]", b"null", b'"error"', b"\xff"])
def test_a_body_that_is_no_object_passes(raw: bytes) -> None:
    seen: Observed = whole(raw, 3)
    assert (seen.tokens, seen.error, seen.ended) == (0, None, True)


def test_an_error_in_a_whole_answer_is_seen() -> None:
    assert whole(b'{"error":{"message":"loading"}}', 5).error == "loading"
    assert whole(answer(error=None), 5).error is None
