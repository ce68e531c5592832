"""The data plane's surface: every route, forwarded as it came and answered as the node answered."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import redis

from app.admission.keys import hash_key
from app.gateway.routes import ROUTES
from tests.cases.conftest import small_settings
from tests.support import state
from tests.support.rawclient import RawClient, ask
from tests.support.rawnode import STREAM_HEAD, RawNode, chunk, json_answer, raw_answer, sized
from tests.support.servers import Gateway, ValkeyServer, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.rawnode import Headers, Peer, Request

BOUNDARY = "----curl-7d83e2d7a141e"


def form(model: str) -> bytes:
    """A multipart upload as curl writes it, the file before the model."""
    audio = os.urandom(60_000)
    parts = [
        b'Content-Disposition: form-data; name="file"; filename="model; name=\\"model\\".wav"\r\n'
        b"Content-Type: audio/wav\r\n\r\n" + audio,
        b'Content-Disposition: form-data; name="response_format"\r\n\r\nsrt',
        b'Content-Disposition: form-data; name="model"\r\n\r\n' + model.encode(),
    ]
    delimiter = b"--" + BOUNDARY.encode()
    whole = b"".join(delimiter + b"\r\n" + part + b"\r\n" for part in parts)
    return whole + delimiter + b"--\r\n"


# What each route is asked with: fields that the gateway does not know, odd spacing and numbers.
JSON_BODIES: dict[str, str] = {
    "/v1/chat/completions": '{"messages":[{"role":"user","content":"hi"}], %s ,"seed":1e-7}',
    "/v1/completions": '{%s,"prompt":["a","b"],"echo":null}',
    "/v1/responses": '{"input":[{"role":"user","content":"hi"}],%s,"store":false}',
    "/v1/messages": '{"max_tokens":9007199254740993,%s,"messages":[]}',
    "/v1/messages/count_tokens": '{%s,"messages":[{"role":"user","content":"hi"}]}',
    "/v1/embeddings": '{"input":"x","encoding_format":"base64",%s}',
    "/v1/moderations": '{"input":"x",%s}',
    "/v1/rerank": '{"query":"q","documents":["a","b"],"top_n":1,%s}',
    "/v2/rerank": '{"query":"q","documents":["a"],%s}',
    "/rerank": '{"query":"q","texts":["a"],%s}',
    "/v1/score": '{"text_1":"a","text_2":["b"],%s}',
    "/score": '{"text_1":"a","text_2":["b"],%s}',
    "/pooling": '{"input":[[1,2]],%s}',
    "/v1/audio/speech": '{"input":"hi","voice":"alloy",%s}',
    "/v1/images/generations": '{"prompt":"a cat","n":1,"size":"1x1",%s}',
    "/tokenize": '{"prompt":"hi",%s,"add_special_tokens":true}',
    "/detokenize": '{"tokens":[1,2],%s}',
}
FORMS = ("/v1/audio/transcriptions", "/v1/audio/translations")
PATHS = (*JSON_BODIES, *FORMS)


def body_of(path: str, model: str) -> bytes:
    if path in FORMS:
        return form(model)
    return (JSON_BODIES[path] % f'"model" :  {json.dumps(model)}').encode()


def request(
    path: str, body: bytes, *, method: str = "POST", kind: str = "", more: Headers | None = None
) -> bytes:
    """A request with the right content type, or another ``kind``."""
    right = f"multipart/form-data; boundary={BOUNDARY}" if path in FORMS else "application/json"
    lines = [
        f"{method} {path}?a=%2F&b HTTP/1.1".encode(),
        b"host: g",
        b"content-type: " + (kind or right).encode(),
        b"content-length: %d" % len(body),
        *(name + b": " + value for name, value in more or []),
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@dataclass(frozen=True)
class Bench:
    """One replica with aliases over one node; ``valkey`` reads their Redis."""

    gw: Gateway
    node: RawNode
    valkey: redis.Redis


@contextlib.contextmanager
def running(**sections: Any) -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ValkeyServer())
        valkey = stack.enter_context(redis.Redis(port=server.port, decode_responses=True))
        node = stack.enter_context(RawNode())
        settings = small_settings([node], circuit={"failure_threshold": 1000, "failure_rate": 1.0})
        gw = stack.enter_context(Gateway({**settings, **sections}, server.url))
        yield Bench(gw, node, valkey)
        assert gw.stop() == 0
        assert "Traceback" not in gw.log, gw.log


@pytest.fixture(scope="module")
def started() -> Iterator[Bench]:
    with running(aliases={"public-name": "m"}) as bench:
        yield bench


@pytest.fixture
def bench(started: Bench) -> Iterator[Bench]:
    """The bench with a node that answers well and has seen nothing; no lease may be left."""
    started.node.script = json_answer()
    started.node.requests.clear()
    yield started
    wait_until(lambda: state.unloaded(started.valkey), what="load = 0")


# Requests


def test_every_route_of_the_table_is_tried_here() -> None:
    assert set(PATHS) == set(ROUTES)


@pytest.mark.parametrize("path", PATHS)
def test_a_request_reaches_the_node_as_it_came(bench: Bench, path: str) -> None:
    body = body_of(path, "m")
    assert ask(bench.gw.port, request(path, body)).status == 200
    (seen,) = bench.node.requests
    assert (seen.method, seen.target) == ("POST", f"{path}?a=%2F&b")
    assert seen.body == body
    kind = dict(line.split(b": ", 1) for line in request(path, b"").splitlines()[1:-1])
    assert seen.header(b"content-type") == kind[b"content-type"]


@pytest.mark.parametrize("path", PATHS)
def test_an_alias_changes_the_models_bytes_and_no_other(bench: Bench, path: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "urandom", lambda n: b"public-name" * (n // 11))
        asked, served = body_of(path, "public-name"), body_of(path, "m")
    assert ask(bench.gw.port, request(path, asked)).status == 200
    (seen,) = bench.node.requests
    assert seen.body == served


@pytest.mark.parametrize("path", PATHS)
def test_another_method_or_content_type_is_told_so_and_reaches_no_node(
    bench: Bench, path: str
) -> None:
    get = ask(bench.gw.port, request(path, b"", method="GET"))
    assert (get.status, get.headers[b"allow"]) == (405, b"POST")
    other = "application/json" if path in FORMS else "multipart/form-data; boundary=x"
    told = ask(bench.gw.port, request(path, body_of(path, "m"), kind=other))
    assert told.status == 415
    coded = request(path, body_of(path, "m"), more=[(b"content-encoding", b"gzip")])
    compressed = ask(bench.gw.port, coded)
    assert (compressed.status, compressed.headers[b"accept-encoding"]) == (415, b"identity")
    unknown = ask(bench.gw.port, request(path, body_of(path, "gpt-9")))
    assert unknown.status == 404
    for client in (get, told, compressed, unknown):
        assert client.headers[b"content-type"] == b"application/json"
        error = client.json()["error"]
        if path.startswith("/v1/messages"):
            assert client.json()["type"] == "error"
            assert set(error) == {"type", "message"}
        else:
            assert set(error) == {"message", "type", "param", "code"}
    assert bench.node.requests == []


@pytest.mark.parametrize("path", ["/v1/responses/resp_1", "/v1/responses/resp_1/cancel"])
@pytest.mark.parametrize("method", ["GET", "DELETE", "POST"])
def test_stored_responses_are_not_known(bench: Bench, path: str, method: str) -> None:
    client = ask(bench.gw.port, request(path, b"{}", method=method))
    assert client.status == 404
    assert client.json()["error"]["code"] == "not_found"
    assert bench.node.requests == []


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_where_one_model_is_served_tokenizing_needs_no_name(bench: Bench, path: str) -> None:
    for body in (b'{"prompt": "hi"}', b'{"prompt":"hi","model":null}'):
        assert ask(bench.gw.port, request(path, body)).status == 200
        assert bench.node.requests[-1].body == body
    chat = ask(bench.gw.port, request("/v1/chat/completions", b'{"messages":[]}'))
    assert (chat.status, chat.json()["error"]["param"]) == (400, "model")


def test_where_two_models_are_served_tokenizing_must_name_one() -> None:
    with RawNode(models=("m", "n")) as node, ValkeyServer() as server:
        with Gateway(small_settings([node]), server.url) as gw:
            client = ask(gw.port, request("/tokenize", b'{"prompt":"hi"}'))
            assert (client.status, client.json()["error"]["param"]) == (400, "model")
            named = ask(gw.port, request("/tokenize", b'{"prompt":"hi","model":"n"}'))
            assert named.status == 200
        assert len(node.requests) == 1


# Answers

ANSWERS: dict[str, tuple[bytes, bytes]] = {
    "subtitles": (b"application/x-subrip", b"1\n00:00:00,000 --> 00:00:01,000\nhi\n"),
    "plain text": (b"text/plain; charset=utf-8", "hé 日".encode()),
    "text that looks like JSON": (b"text/plain", b'{"half": '),
    "audio": (b"audio/mpeg", bytes(range(256)) * 4000),
    "audio that begins like JSON": (b"audio/pcm", b"{" * 5000),
    "an image": (b"image/png", b"\x89PNG\r\n\x1a\n" + bytes(2000)),
    "a list": (b"application/json", b'[{"index": 0, "score": 1e-7}]'),
    "lines of JSON": (b"application/x-ndjson", b'{"a":1}\n{"b":2}\n'),
    "no type at all": (b"", b"\x00\x01"),
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("framing", ["sized", "chunked", "closed"])
def test_an_answer_of_any_kind_passes_as_it_is(bench: Bench, name: str, framing: str) -> None:
    kind, body = ANSWERS[name]
    headers: Headers = [(b"content-type", kind)] if kind else []
    if framing == "sized":
        answer = sized(200, body, headers)
    else:
        lines = [b"HTTP/1.1 200 OK", *(n + b": " + v for n, v in headers)]
        lines.append(
            b"transfer-encoding: chunked" if framing == "chunked" else b"connection: close"
        )
        tail = chunk(body) + b"0\r\n\r\n" if framing == "chunked" else body
        answer = b"\r\n".join(lines) + b"\r\n\r\n" + tail
    bench.node.script = raw_answer(answer)
    client = ask(bench.gw.port, request("/v1/audio/speech", body_of("/v1/audio/speech", "m")))
    assert client.status == 200
    assert client.body == body
    assert client.headers.get(b"content-type", b"") == kind


def test_speech_is_heard_before_its_end(bench: Bench) -> None:
    """Audio is played as it comes: no part of it waits for the next one."""

    async def script(request: Request, peer: Peer) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\ntransfer-encoding: chunked\r\n\r\n"
        await peer.write(head + chunk(b"one"))
        while not heard:
            await peer.sleep(0.005)
        await peer.write(chunk(b"two") + b"0\r\n\r\n")

    heard: list[bool] = []
    bench.node.script = script
    with RawClient(bench.gw.port) as client:
        client.send(request("/v1/audio/speech", body_of("/v1/audio/speech", "m")))
        while client.body != b"one":
            client._read()
        heard.append(True)
        assert client.read_all() == b"onetwo"


@pytest.mark.parametrize("path", [path for path in PATHS if ROUTES[path].ttft == "none"])
def test_work_that_is_no_generation_leaves_no_ttft_sample(bench: Bench, path: str) -> None:
    """A tokenizer's millisecond, or a minute of audio, says nothing about the time to a token."""
    before = state.record(bench.valkey, "b1")["samples"]
    assert ask(bench.gw.port, request(path, body_of(path, "m"))).status == 200
    wait_until(lambda: state.unloaded(bench.valkey), what="load = 0")
    assert state.record(bench.valkey, "b1")["samples"] == before


def test_a_stream_that_is_no_generation_leaves_no_ttft_sample(bench: Bench) -> None:
    events = b'data: {"type":"transcript.text.delta","delta":"a"}\n\n' * 3
    bench.node.script = raw_answer(sized(200, events, [(b"content-type", b"text/event-stream")]))
    before = state.record(bench.valkey, "b1")["samples"]
    client = ask(bench.gw.port, request(FORMS[0], body_of(FORMS[0], "m")))
    assert client.body == events
    wait_until(lambda: state.unloaded(bench.valkey), what="load = 0")
    assert state.record(bench.valkey, "b1")["samples"] == before


def test_one_pass_over_a_prompt_leaves_a_ttft_sample(bench: Bench) -> None:
    before = int(state.record(bench.valkey, "b1")["samples"])
    ask(bench.gw.port, request("/v1/embeddings", body_of("/v1/embeddings", "m")))
    wait_until(
        lambda: int(state.record(bench.valkey, "b1")["samples"]) == before + 1, what="a sample"
    )


# What a stream that breaks off ends with: (events so far, the error event's name)
DIALECTS: dict[str, tuple[bytes, str | None]] = {
    "/v1/chat/completions": (
        b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n',
        None,
    ),
    "/v1/responses": (
        b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",'
        b'"delta":"a"}\n\n',
        "error",
    ),
    "/v1/messages": (
        b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        b'"delta":{"type":"text_delta","text":"a"}}\n\n',
        "error",
    ),
}


@pytest.mark.parametrize("path", DIALECTS)
def test_a_stream_that_breaks_off_ends_with_an_error_in_the_shape_of_its_route(
    bench: Bench, path: str
) -> None:
    so_far, name = DIALECTS[path]

    async def script(request: Request, peer: Peer) -> None:
        await peer.write(STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(so_far))
        await peer.sleep(0.05)
        peer.reset()

    bench.node.script = script
    asked = body_of(path, "m").replace(b"{", b'{"stream":true,', 1)
    client = ask(bench.gw.port, request(path, asked))
    assert (client.status, client.complete) == (200, True)
    assert client.body.startswith(so_far)
    lines = client.body.removeprefix(so_far).removesuffix(b"\n\n").split(b"\n")
    assert [line for line in lines if line.startswith(b"event")] == (
        [b"event: " + name.encode()] if name else []
    )
    told = json.loads(lines[-1].removeprefix(b"data: "))
    assert told["error"]["message"]
    if path == "/v1/messages":
        assert told["type"] == "error"
        assert set(told["error"]) == {"type", "message"}
    else:
        assert told["error"]["code"] == "truncated"
        assert told.get("type") == name


# The control plane's requests are small


def test_the_control_plane_takes_small_bodies_only(bench: Bench) -> None:
    for size, status in ((1024 * 1024, 405), (1024 * 1024 + 1, 413)):
        client = ask(bench.gw.port, request("/admin/scores", b"x" * size))
        assert client.status == status, client.body


# Models, HEAD, OPTIONS


def test_a_model_is_described_by_its_name_and_by_its_alias(bench: Bench) -> None:
    for name in ("m", "public-name"):
        client = ask(bench.gw.port, request(f"/v1/models/{name}", b"", method="GET"))
        assert (client.status, client.json()["id"]) == (200, name)
    client = ask(bench.gw.port, request("/v1/models/none", b"", method="GET"))
    assert (client.status, client.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", PATHS)
def test_options_tells_what_a_route_takes_and_reaches_no_node(bench: Bench, path: str) -> None:
    client = ask(bench.gw.port, request(path, b"", method="OPTIONS"))
    assert (client.status, client.body) == (204, b"")
    assert client.headers[b"allow"] == b"OPTIONS, POST"
    assert bench.node.requests == []


def test_the_key_may_come_the_way_anthropics_clients_send_it() -> None:
    keys = [{"name": "one", "hash": hash_key("sk-one")}]
    path = "/v1/messages"
    with running(keys=keys) as bench:
        bare = ask(bench.gw.port, request(path, body_of(path, "m")))
        assert (bare.status, bare.json()["error"]["type"]) == (401, "authentication_error")
        keyed = request(path, body_of(path, "m"), more=[(b"x-api-key", b"sk-one")])
        assert ask(bench.gw.port, keyed).status == 200
        (seen,) = bench.node.requests
        assert seen.header(b"x-api-key") is None
