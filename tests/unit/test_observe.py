"""The side observer: however the bytes are cut, it hands on the same and has seen the same."""

from __future__ import annotations

import itertools
import json
import re
import tracemalloc
import zlib
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.gateway.observe import EventStream, JsonBody, Observed, observer

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


def renamed(usage: dict[str, int]) -> dict[str, int]:
    """Usage in the words of the other dialects."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "output_tokens": usage["completion_tokens"],
    }


def typed(kind: str, **fields: Any) -> bytes:
    """An event that says twice what it is, as Anthropic and OpenAI responses send them."""
    return stream(f"event: {kind}\n" + json.dumps({"type": kind, **fields}, ensure_ascii=False))


def messages(*texts: str) -> bytes:
    """A stream of Anthropic messages."""
    start: dict[str, Any] = {"id": "msg_1", "role": "assistant", "content": [], "stop_reason": None}
    return b"".join(
        [
            typed(
                "message_start",
                message={**start, "usage": {"input_tokens": 11, "output_tokens": 1}},
            ),
            typed("content_block_start", index=0, content_block={"type": "text", "text": ""}),
            typed("ping"),
            *(
                typed("content_block_delta", index=0, delta={"type": "text_delta", "text": text})
                for text in texts
            ),
            typed("content_block_stop", index=0),
            typed("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 42}),
            typed("message_stop"),
        ]
    )


def responses(*texts: str, end: str = "response.completed", **more: Any) -> bytes:
    """A stream of OpenAI responses."""
    whole: dict[str, Any] = {"id": "resp_1", "object": "response", "error": None, "usage": None}
    return b"".join(
        [
            typed("response.created", response=whole),
            typed("response.in_progress", response=whole),
            typed("response.output_item.added", item={"type": "message", "content": []}),
            *(typed("response.output_text.delta", delta=text, logprobs=[]) for text in texts),
            typed("response.output_text.done", text="".join(texts)),
            typed(end, response={**whole, "usage": renamed(USAGE), **more}),
        ]
    )


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
        error="KV 满",
    ),
    "error first": Recorded(
        stream('{"error": {"message": "no", "code": 500}}'),
        0,
        first_token=False,
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
    "fields of every kind": Recorded(
        stream(
            f"event: message\nid: 1\nretry: 3000\nx-vendor: {{}}\nignored\n{ROLE}",
            *(f"id\n: between\n{event}" for event in PLAIN[1:]),
            "[DONE]",
        ),
        5,
    ),
    "tabs": Recorded(stream(*PLAIN, chunk(None, usage=USAGE), "[DONE]", space="\t"), 42, prompt=11),
    "tabs, no usage": Recorded(stream(*PLAIN, "[DONE]", space="\t"), 5),
    "two spaces, no usage": Recorded(stream(*PLAIN, "[DONE]", space="  "), 5),
    "data without a colon": Recorded(
        b"data\n\n" + stream(*(f"{event}".replace("{", "\n{", 1) for event in PLAIN), "[DONE]"), 5
    ),
    "comments after the end": Recorded(
        stream(*PLAIN, chunk(None, usage=USAGE), "[DONE]", *(f": ping {i}" for i in range(40))),
        42,
        prompt=11,
    ),
    "usage before sixteen choices end": Recorded(
        stream(
            *PLAIN[:2],
            chunk(None, usage=USAGE),
            *(chunk({}, "stop") for _ in range(16)),
            "[DONE]",
        ),
        42,
        prompt=11,
    ),
    "error far from the end": Recorded(
        stream(
            ROLE,
            chunk({"content": "a"}),
            '{"error":{"message":"one of two choices failed"}}',
            *(chunk({"content": "b" * 100}) for _ in range(100)),
            chunk({}, "stop"),
            "[DONE]",
        ),
        102,  # the error counts as an event: none but usage counts exactly
        error="one of two choices failed",
    ),
    "usage in the event of the error": Recorded(
        stream(*PLAIN[:4], json.dumps({"error": {"message": "oom"}, "usage": USAGE})),
        42,
        prompt=11,
        error="oom",
    ),
    "usage, then an error": Recorded(
        stream(*PLAIN[:4], chunk(None, usage=USAGE), '{"error":"oom"}', "[DONE]"),
        42,
        prompt=11,
        error="oom",
    ),
    "Anthropic messages": Recorded(messages("a", "b", "", "c", "𐍈"), 42, prompt=11),
    "Anthropic messages, cut": Recorded(
        b"".join(messages("a", "b", "c").partition(b"event: message_delta")[:1]),
        3,
        prompt=11,
        ended=False,
    ),
    "Anthropic error": Recorded(
        messages("a", "b").partition(b"event: content_block_stop")[0]
        + typed("error", error={"type": "overloaded_error", "message": "Overloaded"}),
        2,
        prompt=11,
        error="Overloaded",
    ),
    "OpenAI responses": Recorded(responses("a", "b", "c"), 42, prompt=11),
    "OpenAI responses, incomplete": Recorded(
        responses("a", "b", end="response.incomplete"), 42, prompt=11
    ),
    "OpenAI responses, failed": Recorded(
        responses("a", "b", end="response.failed", error={"code": "server_error", "message": "x"}),
        42,
        prompt=11,
        error="x",
    ),
    "OpenAI speech": Recorded(
        stream(
            *('{"type":"speech.audio.delta","audio":"AAAA","delta":"AAAA"}' for _ in range(3)),
            json.dumps({"type": "speech.audio.done", "usage": renamed(USAGE)}),
        ),
        42,
        prompt=11,
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
    for i in range(1, len(raw), 1 + len(raw) // 2000):
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


PARTS = [
    b"\r", b"\n", b"\n\n", b"data: ", b"data:{", b'{"choices":[', b'{"error":', b'"x"}', b"}]}",
    b": x", b'"usage":{"prompt_tokens":7}', b"event: error", b"[DONE]", b"\xef\xbb\xbf", b"\xff",
    b"\x00", *map(stream, (ROLE, *PLAIN[1:3], chunk(None, usage=USAGE), '{"error":"x"}')),
]  # fmt: skip


@given(st.lists(st.sampled_from(PARTS) | st.binary(max_size=8), max_size=30), st.data())
def test_arbitrary_bytes_pass_unchanged_and_are_seen_alike_in_any_pieces(
    parts: list[bytes], data: st.DataObject
) -> None:
    raw = b"".join(parts)
    at = data.draw(st.sets(st.integers(0, len(raw)), max_size=10))
    for hide in (False, True):
        found = []
        for pieces in ([raw], cut(raw, at), [raw[i : i + 1] for i in range(len(raw))]):
            seen = EventStream(hide_usage=hide)
            out = b"".join([*map(seen.feed, pieces), seen.rest()])
            assert out == raw or hide
            found.append(
                (out, seen.first_token, seen.tokens, seen.prompt_tokens, seen.ended, seen.error)
            )
        assert len(set(found)) == 1


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
    assert seen.ended  # what follows an error is none of the answer: its word is the last
    assert seen.over


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


@pytest.mark.parametrize("event", [": ping", ROLE, chunk({"content": "a"}), "nonsense"])
def test_a_stream_that_goes_on_for_ever_takes_no_memory(event: str) -> None:
    raw = stream(event)
    seen = EventStream()
    for _ in range(1000):
        seen.feed(raw)
    tracemalloc.start()
    try:
        for _ in range(20_000):
            seen.feed(raw)
        now, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert now < 64 * 1024


LARGE = "x" * 100_000


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (typed("response.created", response={"instructions": LARGE}), (False, 0, 0, False, None)),
        (stream(chunk({"content": LARGE})), (True, 1, 0, False, None)),
        (stream(chunk({"content": LARGE}, "length", usage=USAGE)), (True, 42, 11, True, None)),
        (stream(chunk(tool(LARGE))), (True, 1, 0, False, None)),
        (typed("content_block_delta", delta={"text": LARGE}), (True, 1, 0, False, None)),
        (typed("response.output_text.delta", delta=LARGE), (True, 1, 0, False, None)),
        (
            typed("response.completed", response={"output": LARGE, "usage": renamed(USAGE)}),
            (False, 42, 11, True, None),
        ),
        (
            stream(json.dumps({"error": {"message": LARGE}})),
            (False, 0, 0, True, "a large error event"),
        ),
        (typed("error", error={"message": LARGE}), (False, 0, 0, True, "a large error event")),
        (
            typed("response.failed", response={"error": None, "output": LARGE}),
            (False, 0, 0, True, "a large response.failed event"),
        ),
        (stream(json.dumps({"error": None, **json.loads(chunk({"content": LARGE}))})),
         (True, 1, 0, False, None)),
        (stream(LARGE), (True, 1, 0, False, None)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_very_large_event_is_known_by_its_ends(
    raw: bytes, expected: tuple[Any, ...], end: str
) -> None:
    raw = raw.replace(b"\n", end.encode())
    for size in (len(raw), 65_536, 10_007, len(raw) - 1, len(raw) - 2, len(raw) - 3, len(raw) - 4):
        out, seen = observed([raw[i : i + size] for i in range(0, len(raw), size)])
        assert out == raw
        found = seen.first_token, seen.tokens, seen.prompt_tokens, seen.ended, seen.error
        assert found == expected, size


@pytest.mark.parametrize("size", range(65_528, 65_545))
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_the_limit_of_a_large_event_does_not_depend_on_the_cuts(size: int, end: str) -> None:
    # Its usage stands where only an event that is held is read.
    start = chunk(None, usage=USAGE).removesuffix("}") + ',"x":"'
    event = start + "x" * (size - len(start) - 8) + '"}'
    raw = stream(ROLE, event, chunk({"content": "a"}), end=end)
    ways = [[raw], cut(raw, {1000}), cut(raw, {65_000}), cut(raw, set(range(0, len(raw), 999)))]
    ways += [cut(raw, {len(raw) - i}) for i in range(140, 160)]
    seen = {(s.tokens, s.prompt_tokens) for s in (observed(way)[1] for way in ways)}
    # Large, it counts as one token, and the one behind it as another.
    assert seen == ({(42, 11)} if len(stream(event, end=end)) <= 65_537 else {(2, 0)})


# The usage event that the client did not ask for


def hidden(pieces: list[bytes]) -> tuple[bytes, EventStream]:
    seen = EventStream(hide_usage=True)
    return b"".join([*map(seen.feed, pieces), seen.rest()]), seen


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("space", ["", " "])
@pytest.mark.parametrize("last", [("[DONE]",), ()], ids=["with [DONE]", "without"])
def test_exactly_the_usage_event_is_left_out_and_booked(
    end: str, space: str, last: tuple[str, ...]
) -> None:
    usage = f"id: 7\n{chunk(None, usage=USAGE)}"
    before = stream(": ping", *PLAIN, end=end, space=space)
    after = stream(": ping", *last, end=end, space=space)
    raw = before + stream(usage, end=end, space=space) + after
    for pieces in (
        [raw],
        [raw[i : i + 1] for i in range(len(raw))],
        *([raw[:i], raw[i:]] for i in range(1, len(raw))),
    ):
        out, seen = hidden(pieces)
        assert out == before + after
        assert (seen.tokens, seen.prompt_tokens, seen.ended) == (42, 11, True)
    assert observed([raw])[0] == raw


@pytest.mark.parametrize(
    "event",
    [
        chunk({"content": "a"}, usage=USAGE),
        chunk({}, "stop", usage=USAGE),
        chunk({"content": '"choices":[],"usage":{}'}),
        chunk(None, usage=None),
        chunk(None, prompt_filter_results=[]),
        chunk(None, usage=USAGE, error={"message": "x"}),
        '{"usage":{"prompt_tokens":1}}',
        '{"choices":null,"usage":{"prompt_tokens":1}}',
        '{"type":"ping","usage":{}}',
        '{"choices":[],"usage":{',
        ': {"choices":[],"usage":{}}',
    ],
)
def test_every_other_event_stays(event: str) -> None:
    raw = stream(ROLE, event, chunk({}, "stop"), "[DONE]")
    assert hidden([raw])[0] == raw
    assert hidden([raw[i : i + 1] for i in range(len(raw))])[0] == raw


def test_a_usage_event_beside_a_very_large_event_is_left_out() -> None:
    usage = stream(chunk(None, usage=USAGE))
    large = stream(chunk({"content": LARGE}))
    raw = large + usage + large + usage + stream("[DONE]")
    for size in (len(raw), 65_536, 1000, 17):
        out, _ = hidden([raw[i : i + size] for i in range(0, len(raw), size)])
        assert out == large * 2 + stream("[DONE]"), size


def test_an_unterminated_usage_event_at_the_end_is_left_out() -> None:
    raw = stream(*PLAIN)
    out, seen = hidden([raw, stream(chunk(None, usage=USAGE)).rstrip()])
    assert out == raw
    assert seen.tokens == 42


# How an unterminated stream ends


@pytest.mark.parametrize(
    ("rest", "ended"),
    [
        ("", True),
        ("data: [DONE]", True),
        ("data: {}", True),
        ("data: [DO", False),
        ('data: {"usage":', False),
        ("dat", False),
    ],
)
def test_a_stream_that_stops_inside_an_event_has_not_ended(rest: str, ended: bool) -> None:
    raw = stream(*PLAIN) + rest.encode()
    out, seen = observed([raw[i : i + 10] for i in range(0, len(raw), 10)])
    assert out == raw
    assert seen.ended is ended


def test_the_last_word_is_known_from_a_finish_of_one_choice() -> None:
    for raw, over in (
        (stream(*PLAIN), False),
        (stream(*PLAIN, "[DONE]"), True),
        (messages("a"), True),
        (messages("a").partition(b"event: message_stop")[0], False),
        (responses("a"), True),
        (stream(*PLAIN[:2], '{"error":"x"}'), True),
    ):
        assert observed([raw])[1].over is over


# Answers that a node compresses although it was not asked to


def compressed(raw: bytes, encoding: str, *, flush: bool = True) -> list[bytes]:
    """One piece for each event, flushed."""
    packer = zlib.compressobj(wbits=31 if encoding == "gzip" else 15)
    mode = zlib.Z_SYNC_FLUSH if flush else zlib.Z_NO_FLUSH
    pieces = [packer.compress(part) + packer.flush(mode) for part in re.split(rb"(?<=\n\n)", raw)]
    return [*pieces, packer.flush()]


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("name", ["usage and done", "error event", "no blank line at the end"])
def test_compressed_events_pass_at_once_and_are_seen_all_the_same(encoding: str, name: str) -> None:
    recorded = RECORDED[name]
    for pieces in (
        compressed(recorded.raw, encoding),
        [b"".join(compressed(recorded.raw, encoding, flush=False))],
        [bytes([byte]) for byte in b"".join(compressed(recorded.raw, encoding))],
    ):
        seen = observer(events=True, encoding=encoding.encode(), hide_usage=True)
        assert [seen.feed(piece) for piece in pieces] == pieces
        assert seen.rest() == b""
        assert isinstance(seen, EventStream)
        assert not seen.between_events
        assert (seen.tokens, seen.prompt_tokens, seen.first_token, seen.error) == (
            recorded.tokens, recorded.prompt, recorded.first_token, recorded.error
        )  # fmt: skip


@pytest.mark.parametrize("encoding", [b"gzip", b"x-gzip", b" GZIP ", b"deflate"])
def test_usage_of_a_compressed_body_is_seen(encoding: bytes) -> None:
    plain = answer(100_000)
    packed = zlib.compress(plain, wbits=15 if encoding == b"deflate" else 31)
    seen = observer(events=False, encoding=encoding)
    for i in range(0, len(packed), 100):
        assert seen.feed(packed[i : i + 100]) == packed[i : i + 100]
    assert seen.rest() == b""
    assert (seen.tokens, seen.prompt_tokens, seen.ended) == (42, 11, True)


@pytest.mark.parametrize("encoding", [b"br", b"zstd", b"gzip, br", b"nonsense", b"gzip"])
@pytest.mark.parametrize("events", [True, False])
def test_what_cannot_be_read_passes(encoding: bytes, events: bool) -> None:
    pieces = [b"\x00\xff\n\nnoise", b"data: {}\n\n", b"\n"]
    seen = observer(events=events, encoding=encoding)
    assert [seen.feed(piece) for piece in pieces] == pieces
    assert seen.rest() == b""
    assert seen.ended  # nobody could say otherwise
    assert (seen.tokens, seen.error, seen.first_token) == (0, None, False)


def test_a_read_that_inflates_without_end_is_not_followed() -> None:
    bomb = zlib.compress(b"\0" * 64 * 1024 * 1024, wbits=31)
    seen = observer(events=True, encoding=b"gzip")
    tracemalloc.start()
    try:
        assert seen.feed(bomb) == bomb
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * 1024 * 1024


def test_identity_is_no_encoding() -> None:
    assert type(observer(events=True)) is EventStream
    assert type(observer(events=True, encoding=b"Identity")) is EventStream
    assert type(observer(events=False, encoding=b"identity")) is JsonBody


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


CACHED = {
    "input_tokens": 2,
    "cache_creation_input_tokens": 4,
    "cache_read_input_tokens": 5,
    "cache_creation": {"ephemeral_5m_input_tokens": 4},
    "output_tokens": 42,
}


@pytest.mark.parametrize("padding", [10, 200_000])
def test_a_prompt_is_all_of_it_also_where_a_cache_had_some(padding: int) -> None:
    seen = whole(answer(padding, usage=CACHED), 4096)
    assert (seen.tokens, seen.prompt_tokens) == (42, 11)
    start = typed("message_start", message={"role": "assistant", "usage": CACHED})
    text = typed("content_block_delta", index=0, delta={"type": "text_delta", "text": "x"})
    assert observed([start + text])[1].prompt_tokens == 11


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


@pytest.mark.parametrize("raw", [b"", b"[1]", b"null", b'"error"', b"\xff", b"ID3\x04"])
def test_a_body_that_is_no_object_passes(raw: bytes) -> None:
    seen: Observed = whole(raw, 3)
    assert (seen.tokens, seen.error, seen.ended) == (0, None, True)


def test_json_that_stops_in_its_middle_has_not_ended() -> None:
    raw = answer(10)
    assert whole(raw + b"\r\n ", 7).ended
    for size in range(1, len(raw)):
        assert not whole(raw[:size], 4096).ended, raw[:size]


def test_large_json_that_stops_in_its_middle_has_not_ended() -> None:
    raw = answer(100_000)
    assert whole(raw + b"\n ", 65_536).ended
    for missing in (2, 10, 30, 1000, 20_000):  # an inner end looks like the last one
        assert not whole(raw[:-missing], 65_536).ended, raw[-missing:][:50]


def test_an_error_in_a_whole_answer_is_seen() -> None:
    assert whole(b'{"error":{"message":"loading"}}', 5).error == "loading"
    assert whole(answer(error=None), 5).error is None
