"""H4: what the gateway does not know passes, byte for byte, in both directions and both modes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cases.bench import Bench, Booked, cut_every, in_pieces, renewed, running_bench
from tests.support.rawclient import ask, post
from tests.support.rawnode import DONE_EVENT, STREAM_HEAD, content_event, raw_answer, sized

if TYPE_CHECKING:
    from collections.abc import Iterator

JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
USAGE = '"usage":{"prompt_tokens":31,"completion_tokens":17,"total_tokens":48}'

# Members of an object that no typed model of an answer would bring back as they were.
MEMBERS = {
    "reasoning": '"reasoning":"hm","reasoning_content":null,"reasoning_items":[{"id":"r","x":[]}]',
    "token ids": '"token_ids":[1,2,151643],"prompt_token_ids":null,"prompt_logprobs":null',
    "logprobs": '"logprobs":{"content":[{"token":"a","logprob":-1e-7,"top_logprobs":[]}]}',
    "vendor keys": '"x_groq":{"id":"req"},"timings":{"predicted_ms":1.50},"":0,"$":1,"a.b":2',
    "nulls": '"system_fingerprint":null,"service_tier":null,"kv_transfer_params":null',
    "small and negative numbers": '"a":1e-7,"b":-0.0,"c":-0,"d":1E-400,"e":0.10,"f":1.0,"g":1e+2',
    "integers above 2^53": '"a":9007199254740993,"b":18446744073709551616,"c":-9007199254740993',
    "numbers of many digits": f'"a":{"1" * 300},"b":0.{"3" * 400},"c":3.{"0" * 200}1',
    "numbers above a double": f'"a":1E400,"b":-1e999,"c":{"9" * 5000}',
    "repeated spaces": '"a" :  1 ,   "b":  [ 1 , 2 ]  ,"c" : "  two  spaces  "',
    "order of the keys": '"z":1,"y":2,"a":3,"Z":4,"10":5,"9":6',
    "a key given twice": '"a":1,"a":2,"object":"x","object":"y"',
    "escaped unicode": r'"a":"\u00e9\u0065\ud83d\ude00\u2028","\u0061":"\/\b\f"',
    "unicode as it is": '"é":"😀👩‍👩‍👧\u2028\u0085\ufeff","ключ":"值"',
    "half a surrogate": r'"a":"\ud83d","b":"\udc00 x"',
    "empty things": '"a":[],"b":{},"c":"","d":[[]],"e":[{}],"tool_calls":[]',
    "deep": '"a":' + "[" * 300 + "]" * 300,
    "NaN and Infinity": '"a":NaN,"b":Infinity,"c":-Infinity',
    "usage with more in it": '"usage_":{},"prompt_tokens":1,"details":{"usage":null}',
}
# In one piece also as Python and people write them.
BODIES = {
    "tabs and line ends": '{\r\n\t"choices" : [\n\n\n\t]\r\r\n,%s\n}\n\n \n',
    "a BOM": "\ufeff{%s}",
    "space around": "  \n{%s}\n\n\n",
}


@pytest.fixture(scope="module")
def started() -> Iterator[Bench]:
    with running_bench() as bench:
        yield bench


@pytest.fixture
def bench(started: Bench) -> Bench:
    return renewed(started)


def exchanged(bench: Bench, *, stream: bool) -> bytes:
    """The body of an answer; the client asks for usage, so that nothing is left out."""
    more = b',"stream":true,"stream_options":{"include_usage":true}' if stream else b""
    body = b'{"model":"m1","messages":[]%b}' % more
    client = ask(bench.gw.port, post("/v1/chat/completions", body))
    assert (client.status, client.complete) == (200, True)
    assert bench.node.requests[-1].body == body
    bench.wait_unloaded()
    return client.body


@pytest.mark.parametrize("name", MEMBERS)
def test_a_stream_passes_with(bench: Bench, name: str) -> None:
    member = MEMBERS[name]
    events = [
        f'{{"id":"c","choices":[{{"index":0,"delta":{{"role":"assistant"}},{member}}}],{member}}}',
        *(f'{{"choices":[{{"delta":{{"content":"t{i}",{member}}}}}],{member}}}' for i in range(3)),
        f'{{{member},"choices":[{{"delta":{{}},"finish_reason":"stop",{member}}}]}}',
        f'{{"choices":[],{member},{USAGE}}}',
        "[DONE]",
    ]
    raw = "".join(f"data: {event}\n\n" for event in events).encode()
    for size in (len(raw), 100, 7):
        for framed in (True, False):
            bench.node.script = in_pieces(STREAM_HEAD, cut_every(raw, size), sized=framed)
            before = bench.booked()
            assert exchanged(bench, stream=True) == raw
            booked = bench.booked() - before
            assert (booked.ok, booked.failed, booked.samples) == (1, 0, 1)
            assert (booked.prompt, booked.output) == (31, 17)


@pytest.mark.parametrize("name", MEMBERS)
def test_an_answer_in_one_piece_passes_with(bench: Bench, name: str) -> None:
    member = MEMBERS[name]
    raw = (
        f'{{"id":"c",{member},"choices":[{{"index":0,"message":{{"content":"ok",{member}}},'
        f'"finish_reason":"stop",{member}}}],{USAGE},{member}}}'
    ).encode()
    for framed in (True, False):
        bench.node.script = in_pieces(JSON_HEAD, cut_every(raw, 100), sized=framed)
        before = bench.booked()
        assert exchanged(bench, stream=False) == raw
        assert bench.booked() - before == Booked(prompt=31, output=17, ok=1)


@pytest.mark.parametrize("name", BODIES)
def test_the_white_space_of_an_answer_passes(bench: Bench, name: str) -> None:
    raw = (BODIES[name] % USAGE).encode()
    bench.node.script = raw_answer(sized(200, raw, [(b"content-type", b"application/json")]))
    before = bench.booked()
    assert exchanged(bench, stream=False) == raw
    assert bench.booked() - before == Booked(prompt=31, output=17, ok=1)


@pytest.mark.parametrize(
    "raw",
    [b"", b"\xff\xfe\x00", b"not JSON at all\r\n", b"[1,2]", b"null", b'{"choices":', b"\x1f\x8b"],
)
@pytest.mark.parametrize("kind", [b"application/json", b"text/plain", b"audio/wav", b""])
def test_what_is_no_json_object_passes_as_well(bench: Bench, raw: bytes, kind: bytes) -> None:
    answer = sized(200 if raw else 204, raw, [(b"content-type", kind)] if kind else [])
    bench.node.script = raw_answer(answer.replace(b"content-length: 0\r\n", b""))
    client = ask(bench.gw.port, post("/v1/chat/completions", b'{"model":"m1"}'))
    assert (client.status, client.body) == (200 if raw else 204, raw)
    assert client.headers.get(b"content-type", b"") == kind
    bench.wait_unloaded()


# What is no JSON, or none that a strict parser takes, is told to the client as its mistake: M1.
@pytest.mark.parametrize(
    "name",
    sorted(MEMBERS.keys() - {"NaN and Infinity", "half a surrogate", "numbers above a double"}),
)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "in one piece"])
def test_a_request_reaches_the_node_with(bench: Bench, name: str, stream: bool) -> None:
    member = MEMBERS[name]
    options = '"stream":true,"stream_options":{"include_usage":true,"x":0}' if stream else '"n":1'
    body = f' {{"messages":[{{"content":"a",{member}}}],{member},"model":"m1" , {options}}}\n'
    bench.node.script = in_pieces(STREAM_HEAD, [content_event("a"), DONE_EVENT])
    client = ask(bench.gw.port, post("/v1/chat/completions", body.encode()))
    assert client.status == 200
    assert bench.node.requests[-1].body == body.encode()


@pytest.mark.parametrize(
    "count", ["9007199254740993", "1e3", "9" * 5000, "-1", "true", '"7"', "{}"]
)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "in one piece"])
def test_a_count_that_makes_no_sense_passes_and_harms_nothing(
    bench: Bench, count: str, stream: bool
) -> None:
    usage = f'"usage":{{"prompt_tokens":31,"completion_tokens":{count}}}'
    padding = "x" * 400_000  # more than is held: counts are read from its end
    for content in ("ok", padding) if len(count) < 4000 else ("ok",):
        raw = f'{{"choices":[{{"message":{{"content":"{content}"}}}}],{usage}}}'.encode()
        pieces, head = cut_every(raw, 65_536), JSON_HEAD
        if stream:
            event = f'data: {{"choices":[],"x":"{content}",{usage}}}\n\n'.encode()
            pieces, head = [content_event("a"), event, DONE_EVENT], STREAM_HEAD
        bench.node.script = in_pieces(head, pieces)
        before = bench.booked()
        assert exchanged(bench, stream=stream) == b"".join(pieces)
        booked = bench.booked() - before
        assert (booked.ok, booked.prompt) == (1, 31)
        assert booked.output <= 2, "its events are counted instead"
