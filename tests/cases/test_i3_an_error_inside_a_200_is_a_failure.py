"""I3: an error event inside a 200 stream is a failure in the books, and passes unchanged."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.cases.bench import Bench, Booked, cut_every, in_pieces, renewed, running_bench
from tests.support import state
from tests.support.rawclient import RawClient, ask, chat
from tests.support.rawnode import (
    COMPLETION,
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
    json_answer,
    sse_answer,
)
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

FOUR = ROLE_EVENT + b"".join(content_event(f"t{i} ") for i in range(4))
USAGE = {"prompt_tokens": 31, "completion_tokens": 4, "total_tokens": 35}
OOM: dict[str, Any] = {"error": {"message": "CUDA out of memory", "code": 500}}
CHUNK = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def named(name: str, payload: Any) -> bytes:
    return f"event: {name}\n".encode() + event(payload)


# The error objects of other engines and dialects.
ERRORS = {
    "an object": event(OOM),
    "an object with more": event(
        {"error": {"object": "error", "message": "x", "type": "E", "param": None, "code": 500}}
    ),
    "spaces": b'data: {"error": {"message": "CUDA out of memory", "code": 500}}\n\n',
    "pretty-printed": b'data: {\ndata:   "error" :\ndata:   {"message": "oom"}\ndata: }\n\n',
    "a string": event({"error": "llama runner process has terminated"}),
    "a list": event({"error": [{"msg": "x"}]}),
    "a code alone": event({"error": {"code": 500}}),
    "true": event({"error": True}),
    "the object of vLLM and SGLang": event(
        {
            "object": "error",
            "message": "EngineDeadError",
            "type": "InternalServerError",
            "code": 500,
        }
    ),
    "an event named error": b"event: error\n" + event({"message": "x", "code": 500}),
    "an event named error, no space": b"event:error\ndata:{}\n\n",
    "an event named error, in words": b"event: error\ndata: worker has died\n\n",
    "an event named error, data first": b"data: worker has died\nevent: error\n\n",
    "TGI": b'event:error\ndata:{"error":"Request failed","error_type":"generation"}\n\n',
    "llama.cpp": b'error: {"code":500,"message":"oom","type":"server_error"}\n\n',
    "Anthropic": named(
        "error", {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    ),
    "Anthropic, without the name": event({"type": "error", "error": {"type": "api_error"}}),
    "responses": named("error", {"type": "error", "code": "server_error", "message": "x"}),
    "responses, failed": named(
        "response.failed",
        {"type": "response.failed", "response": {"status": "failed", "error": {"code": "x"}}},
    ),
    "a chunk that carries it": event({**CHUNK, "choices": [], "error": {"message": "x"}}),
    "a choice that carries it": event(
        {**CHUNK, "choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "error"}]}
    ),
    "an id in front": b"id: 7\n: comment\n" + event(OOM),
    "CRLF": event(OOM).replace(b"\n", b"\r\n"),
    "with usage in it": event({**OOM, "usage": USAGE}),
    "behind usage": event({"choices": [], "usage": USAGE}) + event(OOM),
    "and more behind it": event(OOM) + content_event("x") + FINISH_EVENT + DONE_EVENT,
    "and [DONE]": event(OOM) + DONE_EVENT,
    "and much behind it": event(OOM) + content_event("y" * 50) * 400 + FINISH_EVENT + DONE_EVENT,
    "a finish before it": FINISH_EVENT + event(OOM),
    "twice": event(OOM) * 2,
    "as large as its input": event({"error": {"message": "x" * 200_000}}),
}

CONTRASTS = {
    "the word": content_event("error") + content_event("an error: CUDA out of memory"),
    "JSON in the text": content_event('{"error":{"message":"x"}}') + content_event('"error":1'),
    "SSE in the text": content_event("\n\nevent: error\ndata: {}\n\nerror: {}"),
    "null": event({**CHUNK, "choices": [{"delta": {"content": "a"}}], "error": None}) * 3,
    "an empty object": event({**CHUNK, "choices": [{"delta": {"content": "a"}}], "error": {}}),
    "an empty string": event({**CHUNK, "choices": [{"delta": {"content": "a"}}], "error": ""}),
    "false": event({**CHUNK, "choices": [{"delta": {"content": "a"}}], "error": False}),
    "null, with spaces": b'data: {"error" : null , "choices":[]}\n\n',
    "inside a delta": event({**CHUNK, "choices": [{"delta": {"content": "a", "error": "no"}}]}),
    "the arguments of a tool": event(
        {
            **CHUNK,
            "choices": [
                {"delta": {"tool_calls": [{"function": {"name": "error", "arguments": "{}"}}]}}
            ],
        }
    ),
    "other keys": event({**CHUNK, "choices": [], "errors": [], "error_rate": 1, "x_error": "y"}),
    "other events": b'event: errors\ndata: {"type":"no_error"}\n\nevent: stderr\ndata: x\n\n',
    "a comment": b': {"error":{"message":"x"}}\n\n: event: error\n\n',
    "a field that nobody knows": b"errors: {}\nerror\nerror:\nerror: not an object\n\n",
    "a response without one": event(
        {"type": "response.in_progress", "response": {"error": None, "status": "in_progress"}}
    ),
    "a large event of text": content_event('{"error":' * 20_000),
}


@pytest.fixture(scope="module")
def started() -> Iterator[Bench]:
    with running_bench(2) as bench:
        yield bench


@pytest.fixture
def bench(started: Bench) -> Bench:
    return renewed(started)


def assert_no_retry(bench: Bench) -> None:
    assert [len(node.requests) for node in bench.nodes] == [1, 0]
    bench.node.requests.clear()


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_after_four_tokens_is_booked_and_passes_unchanged(bench: Bench, name: str) -> None:
    raw = FOUR + ERRORS[name]
    for size, sized in ((len(raw), True), (97, True), (len(raw), False), (97, False)):
        bench.node.script = in_pieces(STREAM_HEAD, cut_every(raw, size), sized=sized)
        before, streak = bench.booked(), bench.streak()
        request = chat(model="m1", stream_options={"include_usage": True})
        with state.sampling(bench.valkey) as seen:
            client = ask(bench.gw.port, request)
            bench.wait_unloaded()
        assert (client.status, client.complete) == (200, True)
        assert client.body == raw, "nothing is added to it"
        booked = bench.booked() - before
        assert (booked.ok, booked.failed, booked.samples) == (0, 1, 1)
        if "usage" in name:
            assert (booked.prompt, booked.output) == (31, 4)
        assert bench.streak() == streak + 1
        assert seen.highest["b1"] <= 1
        assert_no_retry(bench)


@pytest.mark.parametrize("name", CONTRASTS)
def test_what_only_looks_like_an_error_is_none(bench: Bench, name: str) -> None:
    raw = FOUR + CONTRASTS[name] + FINISH_EVENT + DONE_EVENT
    for size, sized in ((len(raw), True), (97, False)):
        bench.node.script = in_pieces(STREAM_HEAD, cut_every(raw, size), sized=sized)
        before = bench.booked()
        client = ask(bench.gw.port, chat(model="m1"))
        assert (client.status, client.complete, client.body) == (200, True, raw)
        bench.wait_unloaded()
        booked = bench.booked() - before
        assert (booked.ok, booked.failed, booked.samples) == (1, 0, 1)
        assert bench.streak() == 0
        assert_no_retry(bench)


# How the node goes on after its error


@pytest.mark.parametrize("how", ["RST", "FIN", "stall"])
def test_a_connection_that_breaks_after_an_error_adds_no_second_one(bench: Bench, how: str) -> None:
    raw = FOUR + event(OOM)
    seen = threading.Event()

    async def script(request: Request, peer: Peer) -> None:
        await peer.write(STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(raw))
        while not seen.is_set():
            await peer.sleep(0.002)
        if how == "stall":
            await peer.wait_closed()  # the gateway's limit on silence (2 s) ends it
        else:
            peer.reset() if how == "RST" else peer.close()

    bench.node.script = script
    before, streak = bench.booked(), bench.streak()
    with RawClient(bench.gw.port) as client:
        client.send(chat(model="m1"))
        while len(client.body) < len(raw):
            client._read()
        seen.set()
        assert client.read_all() == raw
        assert client.complete
    bench.wait_unloaded()
    booked = bench.booked() - before
    assert (booked.ok, booked.failed) == (0, 1)
    assert bench.streak() == streak + 1
    assert_no_retry(bench)


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_that_leaves_because_of_the_error_does_not_erase_it(
    bench: Bench, how: str
) -> None:
    raw = FOUR + event({**OOM, "usage": USAGE})

    async def script(request: Request, peer: Peer) -> None:
        await peer.write(STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(raw))
        await peer.wait_closed()

    bench.node.script = script
    before, streak = bench.booked(), bench.streak()
    with RawClient(bench.gw.port) as client:
        client.send(chat(model="m1"))
        while len(client.body) < len(raw):
            client._read()
        getattr(client, how)()
    wait_until(lambda: bench.node.left, within_s=2, what="the node's request is ended")
    bench.wait_unloaded()
    assert bench.booked() - before == Booked(prompt=31, output=4, samples=1, failed=1)
    assert bench.streak() == streak + 1


def test_a_client_that_leaves_without_an_error_is_no_failure(bench: Bench) -> None:
    async def script(request: Request, peer: Peer) -> None:
        await peer.write(STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(FOUR))
        await peer.wait_closed()

    bench.node.script = script
    before, streak = bench.booked(), bench.streak()
    with RawClient(bench.gw.port) as client:
        client.send(chat(model="m1")).read_events(5)
        client.close()
    wait_until(lambda: bench.node.left, within_s=2, what="the node's request is ended")
    bench.wait_unloaded()
    assert (bench.booked() - before).failed == 0
    assert bench.streak() == streak


# An error before any event: another node may do it


@pytest.mark.parametrize(
    "name",
    ["an object", "a string", "TGI", "Anthropic", "llama.cpp", "an event named error, in words",
     "as large as its input"],
)  # fmt: skip
def test_an_error_as_the_first_event_goes_to_another_node(bench: Bench, name: str) -> None:
    first: list[int] = []

    async def script(request: Request, peer: Peer) -> None:
        first.append(1)
        parts = [ERRORS[name]] if len(first) == 1 else events(3)
        await sse_answer(parts)(request, peer)

    for node in bench.nodes:
        node.script = script
    before = bench.booked()
    client = ask(bench.gw.port, chat(model="m"))
    if name == "as large as its input":  # it has gone out before it is whole
        assert client.body == ERRORS[name]
        bench.wait_unloaded()
        assert (bench.booked() - before).failed == 1
        return
    assert client.body == b"".join(events(3))
    assert client.headers[b"x-leaseway-attempts"] == b"2"
    bench.wait_unloaded()
    booked = bench.booked() - before
    assert (booked.ok, booked.failed) == (1, 1)


@pytest.mark.parametrize("name", ["an object", "a string", "the object of vLLM and SGLang", "true"])
def test_an_error_in_a_200_in_one_piece_goes_to_another_node(bench: Bench, name: str) -> None:
    told = json.loads(ERRORS[name].removeprefix(b"data: "))
    first: list[int] = []

    async def script(request: Request, peer: Peer) -> None:
        first.append(1)
        await json_answer(200, told if len(first) == 1 else None)(request, peer)

    for node in bench.nodes:
        node.script = script
    before = bench.booked()
    client = ask(bench.gw.port, chat(model="m", stream=False))
    assert (client.status, client.json()) == (200, COMPLETION)
    bench.wait_unloaded()
    booked = bench.booked() - before
    assert (booked.ok, booked.failed) == (1, 1)
    # Where no other node is left, the client gets it as it is.
    bench.node.script = json_answer(200, told)
    client = ask(bench.gw.port, chat(model="m1", stream=False))
    assert (client.status, client.json()) == (200, told)
    bench.wait_unloaded()
    assert (bench.booked() - before).failed == 2


@pytest.mark.parametrize("value", [None, "", {}, [], False])
@pytest.mark.parametrize("stream", [True, False])
def test_an_empty_error_in_an_answer_is_none(bench: Bench, value: Any, stream: bool) -> None:
    if stream:
        bench.node.script = sse_answer(
            [event({**CHUNK, "choices": [], "error": value}), *events(2)]
        )
    else:
        bench.node.script = json_answer(200, {**COMPLETION, "error": value})
    before = bench.booked()
    client = ask(bench.gw.port, chat(model="m1", stream=stream))
    assert client.status == 200
    bench.wait_unloaded()
    assert ((bench.booked() - before).ok, bench.streak()) == (1, 0)
